"""Answers of an engine and of a server, with their tokens and times."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.server.launching import launched
from tests.server.thinking_folder import make_thinking_tokenizer

from quire import LLM
from quire.cli.chat.answers import (
    CHAT_DEFAULTS,
    EngineAnswers,
    LoadedModel,
    ServerAnswers,
    with_chat_defaults,
)
from quire.core.sampling_params import SamplingParams
from quire.errors import CheckpointError, EngineDeadError, InvalidRequestError
from quire.hub.model_folder import EMBEDDED_MODEL
from quire.text.tokenizer import Tokenizer

MESSAGES = [{"role": "user", "content": "What does os.path.join do?"}]
PARAMS = SamplingParams(temperature=0, max_tokens=12)


@pytest.fixture(scope="module")
def server():
    with launched() as running:
        yield running


def test_an_engine_and_a_server_answer_the_same(server):
    local = EngineAnswers(lambda name: LoadedModel("embedded", LLM(), EMBEDDED_MODEL), str)
    remote = ServerAnswers(f"{server.url}/v1/")
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
    with pytest.raises(
        InvalidRequestError, match="does not serve 'embeded'; did you mean embedded"
    ):
        remote.switch("embeded")
    remote.switch("embedded")


def test_where_no_server_listens_the_url_is_named():
    with pytest.raises(EngineDeadError, match=r"no server answers at http://127\.0\.0\.1:1: "):
        ServerAnswers("http://127.0.0.1:1")


def test_options_of_a_chat_fill_in_what_the_caller_left_open():
    found = with_chat_defaults(SamplingParams(temperature=0.2))
    assert (found.temperature, found.top_p, found.min_p) == (0.2, 0.95, 0.05)
    assert with_chat_defaults(SamplingParams()).temperature == CHAT_DEFAULTS["temperature"]


class FakeLLM:
    """Answers each question with the same text, in pieces of two characters."""

    def __init__(self, folder: Path, text: str) -> None:
        self.tokenizer = Tokenizer.from_folder(folder)
        self.text = text
        self.engine = SimpleNamespace(stats=lambda: SimpleNamespace(num_generated_tokens=0))

    def get_tokenizer(self) -> Tokenizer:
        return self.tokenizer

    def stream(self, prompt: dict[str, Any], params: SamplingParams):
        assert prompt["prompt_token_ids"]
        for at in range(0, len(self.text), 2):
            yield self.text[at : at + 2]


def test_reasoning_of_an_engine_is_told_from_its_answer(tmp_path):
    make_thinking_tokenizer(tmp_path)
    llm = FakeLLM(tmp_path, "let me see</think>\n\nIt joins paths.")
    answers = EngineAnswers(lambda name: LoadedModel("m", llm, tmp_path), str)
    pieces = list(answers.stream(MESSAGES, PARAMS))
    said = {
        flag: "".join(p.text for p in pieces if p.is_reasoning is flag) for flag in (True, False)
    }
    assert said[True].strip() == "let me see" and said[False] == "It joins paths."


def test_a_model_that_can_not_be_loaded_leaves_the_one_before(tmp_path):
    make_thinking_tokenizer(tmp_path)
    loads = []

    def load(name: str | None) -> LoadedModel:
        loads.append(name)
        if name == "broken":
            raise CheckpointError("there is no model 'broken'")
        return LoadedModel(name or "first", FakeLLM(tmp_path, "x"), tmp_path)

    def fetch(name: str) -> None:
        if name == "missing":
            raise CheckpointError("there is no model 'missing'")

    answers = EngineAnswers(load, fetch)
    answers.switch("second")
    with pytest.raises(CheckpointError):
        answers.switch("missing")
    assert loads == [None, "second"], "the model before was not unloaded"
    with pytest.raises(CheckpointError):
        answers.switch("broken")
    assert answers.name == "second" and loads == [None, "second", "broken", "second"]
    assert "".join(piece.text for piece in answers.stream(MESSAGES, PARAMS)) == "x"
