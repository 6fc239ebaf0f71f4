"""Follows one answer through its grammar: which tokens may come next, and may it end here.

A state is a pure function of the grammar and of the tokens consumed, so it is rebuilt from these
after a crash or a preemption. Wherever several tokenizations write the same text, all of them are
allowed, unless the grammar says otherwise (`forcing`). Made by `compiler`; used by the engine.
"""

from collections.abc import Callable, Sequence

import llguidance

from quire.errors import GrammarTooComplexError
from quire.text.grammars.vocabulary import GrammarVocabulary

_NOT_ALLOWED = "doesn't satisfy the grammar"
"""In llguidance's words for a token that its mask excludes."""


class GrammarState:
    """Where one sequence is in its grammar. Belongs to one thread at a time.

    Once a method has raised, the state is of no more use.
    """

    __slots__ = ("_matcher", "_on_too_complex", "_vocabulary")

    def __init__(
        self,
        matcher: llguidance.LLMatcher,
        vocabulary: GrammarVocabulary,
        on_too_complex: Callable[[], None],
    ) -> None:
        """Takes `matcher` over. on_too_complex: called where following the grammar goes beyond the
        limits."""
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._on_too_complex = on_too_complex

    def consume(self, token_ids: Sequence[int]) -> None:
        """Go on behind `token_ids`, in their order. An end token may be the last.

        Raises ValueError for a token that the grammar does not allow there (a fault of the caller:
        masks exclude it), GrammarTooComplexError where following it goes beyond the limits.
        """
        if not self._matcher.consume_tokens(list(token_ids)):
            self._fail()

    def mask(self) -> bytes:
        """The tokens that may come next, as `core.step.TokenMasks` has them: a bit for each.

        Whole words of 32 bits; bits beyond the vocabulary are 0. The interpreter's lock is released
        meanwhile. Raises GrammarTooComplexError.
        """
        mask = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            self._fail()
        vocabulary = self._vocabulary
        if vocabulary.end_token_ids:
            return mask[: vocabulary.mask_bytes]
        cut = int.from_bytes(mask, "little") & ((1 << vocabulary.vocab_size) - 1)
        return cut.to_bytes(vocabulary.mask_bytes, "little")

    def fill_mask(self, row: memoryview) -> None:
        """Write `mask` into `row`: writable, contiguous, `GrammarVocabulary.mask_bytes` long."""
        row.cast("B")[:] = self.mask()

    @property
    def can_end(self) -> bool:
        """Whether the answer is complete as it is: an end token may follow."""
        return self._matcher.is_accepting()

    @property
    def is_finished(self) -> bool:
        """Whether the answer is complete and nothing but an end token may follow."""
        return self._matcher.is_stopped()

    def copy(self) -> "GrammarState":
        """An equal state that goes its own way."""
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
