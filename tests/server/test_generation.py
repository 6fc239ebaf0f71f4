"""Which prompts are worked on in a thread."""

import asyncio
import threading

import pytest

from quire.core.sampling_params import SamplingParams
from quire.errors import InvalidRequestError
from quire.server import generation as generation_module
from quire.server import service as service_module
from quire.server.generation import prepare


@pytest.mark.parametrize(
    ("prompts", "in_thread"),
    [
        (["123456789"], False),
        (["1234567890"], True),
        ([list(range(9))], False),
        ([list(range(10))], True),
        (["12345", [1, 2, 3, 4, 5]], True),
    ],
)
def test_characters_and_token_ids_count_alike(monkeypatch, prompts, in_thread):
    threads = []

    def refuse(*_):
        threads.append(threading.current_thread())
        raise InvalidRequestError("seen")

    monkeypatch.setattr(service_module, "LONG_TEXT_CHARACTERS", 10)
    monkeypatch.setattr(generation_module, "_make_requests", refuse)
    with pytest.raises(InvalidRequestError, match="seen"):
        asyncio.run(prepare(None, "call", prompts, SamplingParams(), 0))
    assert (threads != [threading.current_thread()]) == in_thread
