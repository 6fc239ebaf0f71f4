"""The shared compiler: what a server makes at start, and what it leaves for the first grammar."""

import threading

import pytest

from quire.core.structured_outputs import StructuredOutputsParams
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
def test_a_large_vocabulary_is_made_at_start_in_a_thread_and_once(vocab_size, num_before):
    tokenizer = Tokenizer.from_folder(EMBEDDED_MODEL)
    shared, asked = shared_compiler(vocab_size, tokenizer)
    shared.begin()
    shared.finish()
    assert asked == ["quire-vocabulary_0"] * num_before
    state = shared.compile(GRAMMAR).start()
    state.consume(tokenizer.encode("yes"))
    assert state.is_finished and len(asked) == 1


def test_a_tokenizer_that_can_not_be_read_is_reported_where_it_is_waited_for():
    def find_tokenizer() -> Tokenizer:
        raise CheckpointError("no tokenizer")

    shared = SharedCompiler(find_tokenizer, LARGE_VOCABULARY)
    shared.begin()
    with pytest.raises(CheckpointError, match="no tokenizer"):
        shared.finish()


def test_a_compiler_without_end_tokens_checks_grammars():
    shared = SharedCompiler(lambda: Tokenizer.from_folder(EMBEDDED_MODEL), 4096)
    assert shared.compile(GRAMMAR)
    with pytest.raises(InvalidRequestError, match="too large: 5000"):
        shared.compile("start: <[5000]>")
