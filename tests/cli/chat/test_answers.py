"""Answers of an engine and of a server, with their tokens and times."""

import pytest
from tests.server.launching import launched

from quire import LLM
from quire.cli.chat.answers import (
    CHAT_DEFAULTS,
    EngineAnswers,
    ServerAnswers,
    with_chat_defaults,
)
from quire.core.sampling_params import SamplingParams
from quire.errors import EngineDeadError, InvalidRequestError

MESSAGES = [{"role": "user", "content": "What does os.path.join do?"}]
PARAMS = SamplingParams(temperature=0, max_tokens=12)


@pytest.fixture(scope="module")
def server():
    with launched() as running:
        yield running


def test_an_engine_and_a_server_answer_the_same(server):
    llm = LLM()
    local, remote = EngineAnswers("embedded", llm), ServerAnswers(f"{server.url}/v1/")
    assert remote.name == "embedded"
    texts = [
        "".join(piece.text for piece in each.stream(MESSAGES, PARAMS)) for each in (local, remote)
    ]
    assert texts[0] == texts[1] != ""
    for each in (local, remote):
        assert each.usage.num_tokens == 12
        assert 0 < each.usage.first_s < each.usage.total_s
        assert "12 tokens, " in str(each.usage) and "tokens/s, first token after" in str(each.usage)
    # The embedded model names its own options, so a chat keeps them.
    assert local.with_defaults(PARAMS) is PARAMS
    with pytest.raises(InvalidRequestError, match="not served here"):
        list(ServerAnswers(server.url, "other").stream(MESSAGES, PARAMS))


def test_where_no_server_listens_the_url_is_named():
    with pytest.raises(EngineDeadError, match=r"no server answers at http://127\.0\.0\.1:1: "):
        ServerAnswers("http://127.0.0.1:1")


def test_options_of_a_chat_fill_in_what_the_caller_left_open():
    found = with_chat_defaults(SamplingParams(temperature=0.2))
    assert (found.temperature, found.top_p, found.min_p) == (0.2, 0.95, 0.05)
    assert with_chat_defaults(SamplingParams()).temperature == CHAT_DEFAULTS["temperature"]
