"""The prompts by which models of code fill a gap in a text.

A model that was trained so generates the text between a prefix and a suffix (Bavarian et al., 2022,
"Efficient training of language models to fill in the middle"). Each family has tokens of its own,
so the tokenizer tells which format a model knows. Called by the routes of completions.
"""

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import pairwise

from quire.errors import InvalidRequestError
from quire.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class FillFormat:
    """The tokens of one family, in the order in which its models were trained to read them."""

    #: Token before the text that precedes the gap.
    prefix: str
    #: Token before the text that follows the gap.
    suffix: str
    #: Token after both texts, before the gap's text; None if the format has no such token.
    middle: str | None
    #: Whether the suffix comes before the prefix.
    is_suffix_first: bool = False

    @property
    def tokens(self) -> tuple[str, ...]:
        """The tokens that the tokenizer must have."""
        return tuple(each for each in (self.prefix, self.suffix, self.middle) if each is not None)


FORMATS: Mapping[str, FillFormat] = {
    "Qwen2.5-Coder, Qwen3-Coder, CodeGemma, Granite 4": FillFormat(
        "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"
    ),
    "StarCoder, StarCoder2, Stable Code, Granite Code": FillFormat(
        "<fim_prefix>", "<fim_suffix>", "<fim_middle>"
    ),
    "SantaCoder": FillFormat("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    "DeepSeek-Coder, DeepSeek-V2 and later": FillFormat(
        "<\uff5cfim▁begin\uff5c>", "<\uff5cfim▁hole\uff5c>", "<\uff5cfim▁end\uff5c>"
    ),
    "Code Llama": FillFormat("▁<PRE>", "▁<SUF>", "▁<MID>"),
    "Codestral, Devstral": FillFormat("[PREFIX]", "[SUFFIX]", None, is_suffix_first=True),
    "Seed-Coder": FillFormat(
        "<[fim-prefix]>", "<[fim-suffix]>", "<[fim-middle]>", is_suffix_first=True
    ),
}
"""The formats by the families that have them. The first one whose tokens a tokenizer has counts."""

ENDS = (
    "<|endoftext|>",
    "<|fim_pad|>",
    "<|file_sep|>",
    "<|repo_name|>",
    "<|file_separator|>",
    "<fim_pad>",
    "<file_sep>",
    "<filename>",
    "<\uff5cend▁of▁sentence\uff5c>",
    "▁<EOT>",
)
"""Tokens after which a model of code has filled the gap, and begins another file."""


class FillInMiddle:
    """Makes the prompts that ask a model to fill a gap."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Finds the format of the tokenizer's model."""
        self._tokenizer = tokenizer
        known = tokenizer.added_tokens
        #: The model's format; None if the tokenizer has the tokens of no known format.
        self.format = next((each for each in FORMATS.values() if _has(known, each.tokens)), None)
        #: Ids of the tokens that end the filled text.
        self.end_token_ids: tuple[int, ...] = ()
        if self.format is not None:
            ends = (*ENDS, *self.format.tokens)
            self.end_token_ids = tuple(sorted({known[each] for each in ends if each in known}))
            special = tokenizer.special_token_ids
            cut = [each for each in known if known[each] in special or each in ends]
            #: Finds the first character of a special token, or of a token of the format.
            self._cut = re.compile(
                "|".join(f"{re.escape(e[0])}(?={re.escape(e[1:])})" for e in cut)
            )

    def encode(
        self, prefix: str | list[int], suffix: str, *, add_special_tokens: bool = True
    ) -> list[int]:
        """The prompt of the gap between `prefix` and `suffix`.

        `prefix` may be token ids. With `add_special_tokens`, the prompt begins with the tokens that
        the tokenizer puts before a text. Special tokens that `suffix` spells are encoded as text.
        Raises InvalidRequestError if the model has no format.
        """
        form = self.format
        if form is None:
            raise InvalidRequestError(
                "suffix is set, but this model's tokenizer has no tokens for filling a gap"
                f" (such as {FORMATS[next(iter(FORMATS))].prefix}); leave it out, or serve a model"
                " of code that has them",
                "suffix",
            )
        known, plain = self._tokenizer.added_tokens, self._encode
        before = prefix if isinstance(prefix, list) else plain(prefix)
        first = [known[form.prefix], *before]
        second = [known[form.suffix], *self._encode_text(suffix)]
        parts = [*second, *first] if form.is_suffix_first else [*first, *second]
        middle = [] if form.middle is None else [known[form.middle]]
        start = self._start if add_special_tokens else []
        return [*start, *parts, *middle]

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False) if text else []

    def _encode_text(self, suffix: str) -> list[int]:
        """The tokens of a text that is cut after the first character of each special token, so that
        the tokenizer finds no special tokens."""
        ends = [found.end() for found in self._cut.finditer(suffix)]
        pieces = [suffix[begin:end] for begin, end in pairwise([0, *ends, len(suffix)])]
        return [i for piece in pieces for i in self._tokenizer.encode_continuation(piece)]

    @property
    def _start(self) -> list[int]:
        """The tokens that the tokenizer puts before each text: a BOS token, or none."""
        bos = self._tokenizer.bos_token_id
        return [] if bos is None or self._tokenizer.encode("")[:1] != [bos] else [bos]


def _has(known: Collection[str], tokens: Collection[str]) -> bool:
    return all(each in known for each in tokens)
