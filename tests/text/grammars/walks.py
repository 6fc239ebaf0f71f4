"""Walks through grammars: what texts they accept, and random answers that obey them."""

import random
from functools import cache

from quire.core.structured_outputs import StructuredOutputsParams
from quire.text.grammars.compiler import GrammarCompiler
from quire.text.grammars.grammar_text import grammar_of
from quire.text.grammars.state import GrammarState
from quire.text.tokenizer import Tokenizer


def allowed(state: GrammarState) -> set[int]:
    """The ids that the state's mask allows."""
    mask = int.from_bytes(state.mask(), "little")
    return {token_id for token_id in range(mask.bit_length()) if mask >> token_id & 1}


def accepts(compiler: GrammarCompiler, params: StructuredOutputsParams, text: str) -> bool:
    """Whether `text`, a byte a token, is a complete answer; masks and `consume` must agree."""
    state = compiler.compile(grammar_of(params)).start()
    for token_id in byte_tokens(compiler, text):
        if token_id not in allowed(state):
            return False
        state.consume([token_id])
    return state.can_end


def byte_tokens(compiler: GrammarCompiler, text: str) -> list[int]:
    by_byte = _ids_of_bytes(compiler.tokenizer)
    return [by_byte[bytes([byte])] for byte in text.encode()]


@cache
def _ids_of_bytes(tokenizer: Tokenizer) -> dict[bytes, int]:
    return {
        tokenizer.token_bytes(token_id): token_id
        for token_id in reversed(range(tokenizer.vocab_size))
        if token_id not in tokenizer.special_token_ids
    }


def random_answer(
    compiler: GrammarCompiler, grammar: str, seed: int, max_tokens: int = 400
) -> bytes | None:
    """The bytes of an answer drawn from the masks; None for one that got longer than max_tokens."""
    state = compiler.compile(grammar).start()
    draw = random.Random(seed)
    written = b""
    ends = set(compiler.vocabulary.end_token_ids)
    for _ in range(max_tokens):
        choices = sorted(allowed(state))
        if ends & set(choices) and (len(choices) == len(ends) or draw.random() < 0.2):
            return written
        token_id = draw.choice([choice for choice in choices if choice not in ends])
        written += compiler.tokenizer.token_bytes(token_id)
        state.consume([token_id])
    return None
