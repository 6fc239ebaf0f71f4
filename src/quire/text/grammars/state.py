"""Follows one answer through its grammar: allowed next tokens, and whether it may end.

A state is a pure function of the grammar and of the consumed tokens, so it can be rebuilt from
these after a crash or a preemption. If several token sequences write the same text, all are
allowed, unless the grammar forces tokens (`grammar_header`). Made by `compiler`; used by the
engine.
"""

from collections.abc import Callable, Sequence

import llguidance

from quire.errors import GrammarTooComplexError
from quire.text.grammars.vocabulary import GrammarVocabulary

_NOT_ALLOWED = "doesn't satisfy the grammar"
"""llguidance's message for a token that its mask excludes."""


class GrammarState:
    """The position of one sequence in its grammar. Not thread-safe.

    Once a method has raised, the state must not be used any more.
    """

    __slots__ = ("_matcher", "_on_too_complex", "_vocabulary")

    def __init__(
        self,
        matcher: llguidance.LLMatcher,
        vocabulary: GrammarVocabulary,
        on_too_complex: Callable[[], None],
    ) -> None:
        """Takes ownership of `matcher`. `on_too_complex` is called when following the grammar
        exceeds the limits."""
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._on_too_complex = on_too_complex

    def consume(self, token_ids: Sequence[int]) -> None:
        """Advance by `token_ids`, in their order. The last one may be an end token.

        Raises ValueError for a token that the grammar does not allow there (a bug of the caller,
        since masks exclude it), and GrammarTooComplexError if following it exceeds the limits.
        """
        if not self._matcher.consume_tokens(list(token_ids)):
            self._fail()

    def mask(self) -> bytes:
        """The allowed next tokens in the format of `core.step.TokenMasks`: a bit for each token.

        The length is a multiple of 32 bits; bits beyond the vocabulary are 0. Releases the
        interpreter's lock. Raises GrammarTooComplexError.
        """
        mask = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            self._fail()
        vocabulary = self._vocabulary
        if vocabulary.end_token_ids:
            return mask[: vocabulary.mask_bytes]
        # The stand-in for an end token has a bit beyond the vocabulary, which is cleared.
        cut = int.from_bytes(mask, "little") & ((1 << vocabulary.vocab_size) - 1)
        return cut.to_bytes(vocabulary.mask_bytes, "little")

    @property
    def can_end(self) -> bool:
        """Whether the answer is complete so far: an end token may follow."""
        return self._matcher.is_accepting()

    @property
    def is_finished(self) -> bool:
        """Whether the answer is complete, and only an end token may follow."""
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
