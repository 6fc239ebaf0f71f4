"""Random walks through a grammar's masks: texts that a model might write under it."""

import random
from dataclasses import dataclass

from tests.text.small_tokenizers import make_byte_level
from tokenizers import AddedToken

from quire.text.grammars.compiler import GrammarCompiler
from quire.text.parsers.dialect import Dialect
from quire.text.parsers.dialect_choice import DIALECTS
from quire.text.tokenizer import Tokenizer
from quire.text.tokenizer_config import TokenizerConfig

END = "<|im_end|>"


def tokenizer_with_marks() -> Tokenizer:
    """A small tokenizer to which the marks of all dialects are special tokens."""
    backend = make_byte_level()
    marks = sorted(frozenset[str]().union(*(d.special_tokens for _, d in DIALECTS.items())))
    backend.add_special_tokens([AddedToken(mark, special=True) for mark in marks])
    return Tokenizer(backend, TokenizerConfig(named_tokens={"eos_token": AddedToken(END)}))


def tokenizer_without_marks() -> Tokenizer:
    """A small tokenizer to which all marks are text."""
    backend = make_byte_level()
    return Tokenizer(backend, TokenizerConfig(named_tokens={"eos_token": AddedToken(END)}))


@dataclass(frozen=True)
class Phrases:
    """What walks like to write, since pure chance would not find it.

    closing: ends something, or has to come before the end. A walk that is to end writes these.
    There is no white space alone, which grammars allow without end.
    """

    opening: list[str]
    closing: list[str]


def phrases_of(dialect: Dialect) -> Phrases:
    """The marks of a dialect, and those of JSON."""
    opening = {*"{[,:1a\n", ", ", '": ', *dialect.special_tokens}
    closing = {*'"}]):1,[{', '"}'}
    for form in dialect.calls:
        closing.update((form.end, form.call_end, form.end.strip()))
        space = getattr(form, "value_space", "")
        closing.update((space + getattr(form, "parameter_end", ""), getattr(form, "quote", "")))
        opening.update((form.begin, form.call_begin, form.separator))
    if dialect.reasoning is not None:
        closing.update(dialect.reasoning.end)
        opening.update(dialect.reasoning.begin)
    if dialect.channels is not None:
        closing.add(dialect.channels.ends[0])
        for channel in (dialect.channels.answer_channel, dialect.channels.call_channel):
            closing.add(dialect.channels.channel + channel)
    found = (sorted(each for each in phrases if each.strip()) for phrases in (opening, closing))
    return Phrases(*found)


def walk(
    compiler: GrammarCompiler, grammar: str, phrases: Phrases, seed: int, max_tokens: int = 300
) -> tuple[str, bool]:
    """A text that the grammar allows, and whether it came to its end."""
    rng = random.Random(seed)
    tokenizer, state = compiler.tokenizer, compiler.compile(grammar).start()
    (end,) = compiler.vocabulary.end_token_ids
    opening, closing = (
        [tokenizer.encode(phrase, add_special_tokens=False) for phrase in each]
        for each in (phrases.opening + phrases.closing, phrases.closing)
    )
    written = b""
    planned: list[int] = []
    for num_tokens in range(max_tokens):
        mask = state.mask()
        is_late = num_tokens > max_tokens // 5
        if _allows(mask, end) and rng.random() < (0.9 if is_late else 0.2):
            return written.decode(errors="replace"), True
        if planned and not _allows(mask, planned[0]):
            planned = []
        if not planned and rng.random() < (1.0 if is_late else 0.6):
            fitting = [ids for ids in closing if _allows(mask, ids[0])] if is_late else []
            fitting = fitting or [ids for ids in opening if _allows(mask, ids[0])]
            planned = list(rng.choice(fitting)) if fitting else []
        token_id = planned.pop(0) if planned else _any_token(mask, end, rng)
        if token_id == end:
            return written.decode(errors="replace"), True
        state.consume([token_id])
        written += tokenizer.token_bytes(token_id)
    return written.decode(errors="ignore"), False  # maybe in the middle of a character


def _allows(mask: bytes, token_id: int) -> bool:
    return bool(mask[token_id // 8] >> token_id % 8 & 1)


def _any_token(mask: bytes, end: int, rng: random.Random) -> int:
    bits = int.from_bytes(mask, "little")
    assert bits, "nothing is allowed"
    allowed = [at for at in range(len(mask) * 8) if bits >> at & 1]
    return rng.choice([at for at in allowed if at != end] or allowed)
