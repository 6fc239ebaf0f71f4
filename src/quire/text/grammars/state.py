"""Follows one answer through its grammar: gives the allowed next tokens, and when it may end.

A state depends only on the grammar and the consumed tokens, so it can be rebuilt from them after a
crash or a preemption. If several token sequences spell the same text, all of them are allowed,
unless the grammar forces tokens (`grammar_header`). `compiler` makes states; the engine uses them.
"""

import re
from collections.abc import Callable, Sequence

import llguidance

from quire.errors import GrammarTooComplexError
from quire.text.grammars.vocabulary import GrammarVocabulary

_NOT_ALLOWED = "doesn't satisfy the grammar"
"""A part of llguidance's error message for a token that its mask excludes."""

_MARK = b"\xff"
"""The byte, which no text has, with which llguidance's bytes begin a token named by its id."""

_TOKEN_ID = re.compile(_MARK + rb"\[(\d+)\]")


class GrammarState:
    """The position of one generated sequence in its grammar. Not thread-safe.

    After a method has raised an error, the state must not be used.
    """

    __slots__ = ("_matcher", "_on_too_complex", "_vocabulary")

    def __init__(
        self,
        matcher: llguidance.LLMatcher,
        vocabulary: GrammarVocabulary,
        on_too_complex: Callable[[], None],
    ) -> None:
        """Takes ownership of `matcher`. `on_too_complex` is called before GrammarTooComplexError is
        raised."""
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._on_too_complex = on_too_complex

    def consume(self, token_ids: Sequence[int]) -> None:
        """Advance by `token_ids`, in order. The last token may be an end token.

        Raises ValueError for a token that the grammar does not allow (a bug of the caller, since
        masks exclude it), and GrammarTooComplexError if the grammar exceeds llguidance's limits.
        """
        if not self._matcher.consume_tokens(list(token_ids)):
            self._fail()

    def mask(self) -> bytes:
        """The mask of allowed next tokens, in the format of `core.step.TokenMasks`: one bit per
        token.

        The length is a multiple of 32 bits; bits beyond the vocabulary are 0. Releases the GIL.
        Raises GrammarTooComplexError.
        """
        mask = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            self._fail()
        vocabulary = self._vocabulary
        if vocabulary.end_token_ids:
            return mask[: vocabulary.mask_bytes]
        # Clear the bit beyond the vocabulary, which belongs to the stand-in for an end token.
        cut = int.from_bytes(mask, "little") & ((1 << vocabulary.vocab_size) - 1)
        return cut.to_bytes(vocabulary.mask_bytes, "little")

    def forced_tokens(self, most: int) -> list[int]:
        """The tokens into which the tokenizer splits the text that must come next, and the tokens
        that must come by their ids; at most `most`.

        The grammar may allow other tokens with this text, too.
        """
        # `compute_ff_bytes` advances the matcher, which computes no mask after a token that the
        # grammar names by its id. So a copy is asked; copying takes a microsecond.
        forced = self._matcher.deep_copy().compute_ff_bytes()
        if not forced or most < 1:
            return []
        tokenize = self._vocabulary.tokenizer.tokenize_bytes
        found: list[int] = []
        for at, part in enumerate(_TOKEN_ID.split(forced)):
            if at % 2:
                found.append(int(part))
                continue
            text, unknown, _ = part.partition(_MARK)
            # A token has at least a byte, so the first 4 * most bytes nearly always have enough
            # tokens.
            found += tokenize(text[: 4 * most])
            if unknown or len(found) >= most:
                break
        return found[:most]

    @property
    def can_end(self) -> bool:
        """True if the answer is complete, so that an end token may follow."""
        return self._matcher.is_accepting()

    @property
    def is_finished(self) -> bool:
        """True if the answer is complete and only an end token may follow."""
        return self._matcher.is_stopped()

    def copy(self) -> "GrammarState":
        """An equal, independent state."""
        return GrammarState(self._matcher.deep_copy(), self._vocabulary, self._on_too_complex)

    def _fail(self) -> None:
        message = self._matcher.get_error()
        if _NOT_ALLOWED in message:
            raise ValueError(f"the grammar does not allow this: {message.splitlines()[0]}")
        self._on_too_complex()
        raise GrammarTooComplexError(
            "the grammar became too complex to follow in the middle of the answer "
            f"({message.splitlines()[0]}); simplify it, or ask for less at once"
        )
