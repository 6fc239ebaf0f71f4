"""The shared compiler: what a server makes at start, and what it leaves for the first grammar."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from quire.core.structured_outputs import StructuredOutputsParams
from quire.engine.grammar_work import GrammarWork
from quire.engine_client.grammars import LARGE_VOCABULARY, SharedCompiler
from quire.errors import CheckpointError, InvalidRequestError
from quire.hub.model_folder import EMBEDDED_MODEL
from quire.text.grammars.grammar_text import grammar_of
from quire.text.tokenizer import Tokenizer

GRAMMAR = grammar_of(StructuredOutputsParams(choice=["yes", "no"]))


def shared_compiler(vocab_size: int, tokenizer: Tokenizer) -> tuple[SharedCompiler, list[str]]:
    """With the names of the threads in which it asks for the tokenizer."""
    asked: list[str] = []

    def find_tokenizer() -> Tokenizer:
        asked.append(threading.current_thread().name)
        return tokenizer

    return SharedCompiler(find_tokenizer, vocab_size, [0]), asked


@pytest.mark.parametrize(
    ("vocab_size", "num_before"), [(LARGE_VOCABULARY - 1, 0), (LARGE_VOCABULARY, 1)]
)
def test_a_large_vocabulary_is_made_ahead_in_a_thread_and_once(
    vocab_size: int, num_before: int
) -> None:
    tokenizer = Tokenizer.from_folder(EMBEDDED_MODEL)
    shared, asked = shared_compiler(vocab_size, tokenizer)
    with ThreadPoolExecutor(1, "slow") as thread:
        GrammarWork(shared, (0,), threads=thread).prepare()
    assert asked == ["slow_0"] * num_before
    state = shared.compile(GRAMMAR).start()
    state.consume(tokenizer.encode("yes"))
    assert state.is_finished and len(asked) == 1


def test_a_tokenizer_that_can_not_be_read_is_reported_for_each_grammar() -> None:
    def find_tokenizer() -> Tokenizer:
        raise CheckpointError("no tokenizer")

    shared = SharedCompiler(find_tokenizer, LARGE_VOCABULARY)
    with ThreadPoolExecutor(1) as thread:
        GrammarWork(shared, (0,), threads=thread).prepare()
    with pytest.raises(CheckpointError, match="no tokenizer"):
        shared.compile(GRAMMAR)


def test_a_compiler_without_end_tokens_checks_grammars():
    shared = SharedCompiler(lambda: Tokenizer.from_folder(EMBEDDED_MODEL), 4096)
    assert shared.compile(GRAMMAR)
    with pytest.raises(InvalidRequestError, match="too large: 5000"):
        shared.compile("start: <[5000]>")
