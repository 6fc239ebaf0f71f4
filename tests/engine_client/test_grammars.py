"""The shared compiler: what a server makes at start, and what it leaves for the first grammar."""

import pytest

from quire.core.sampling_params import ModelLimits
from quire.core.structured_outputs import StructuredOutputsParams
from quire.engine_client.grammars import LARGE_VOCABULARY, SharedCompiler
from quire.hub.model_folder import EMBEDDED_MODEL
from quire.text.grammars.front import grammar_of
from quire.text.tokenizer import Tokenizer

GRAMMAR = grammar_of(StructuredOutputsParams(choice=["yes", "no"]))


@pytest.mark.parametrize(
    ("vocab_size", "generates", "num_before"),
    [(LARGE_VOCABULARY - 1, True, 0), (LARGE_VOCABULARY, True, 1), (LARGE_VOCABULARY, False, 0)],
)
def test_a_large_vocabulary_is_made_at_start_and_once(vocab_size, generates, num_before):
    tokenizer = Tokenizer.from_folder(EMBEDDED_MODEL)
    asked = []

    def find_tokenizer():
        asked.append(tokenizer)
        return tokenizer

    limits = ModelLimits(vocab_size=vocab_size, max_model_len=64, generates=generates)
    shared = SharedCompiler(find_tokenizer, limits)
    shared.prepare()
    assert len(asked) == num_before
    state = shared.compile(GRAMMAR).start()
    state.consume(tokenizer.encode("yes"))
    assert state.is_finished and len(asked) == 1
