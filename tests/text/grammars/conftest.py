"""Compilers of grammars over the small tokenizers."""

import pytest

from quire.text.grammars.compiler import GrammarCompiler
from quire.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def compiler(byte_level: Tokenizer) -> GrammarCompiler:
    """For a model whose vocabulary is larger than its tokenizer's, as most are."""
    assert byte_level.eos_token_id is not None
    return GrammarCompiler(byte_level, 512, [byte_level.eos_token_id])
