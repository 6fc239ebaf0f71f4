"""Token masks of a sequence with a grammar: which tokens may come next, computed in threads.

A mask depends only on the sequence's tokens, which are all known when the step that samples the
next token is planned. So a thread computes the mask while the forward pass runs. A slow mask would
delay the other rows of the step. So after a slow mask, the sequence is planned again only when its
next mask is ready (`Constraint.is_ready`). Works on token ids alone, without text. Only
`grammar_work` uses this module.
"""

import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Tokens
from concurrent.futures import Executor, Future
from itertools import chain
from typing import Protocol

from quire.core.sampling_params import DecodingParams
from quire.core.step import TokenMasks

SLOW_MASK_S = 0.003
"""A mask counts as slow from this many seconds of processor time, about a decode step of a small
model."""


class FollowedGrammar(Protocol):
    """The place in a grammar that a sequence's tokens have reached; implemented in `text.grammars`.

    The methods raise ValueError if the grammar can't be followed any further: because it does not
    allow a token, or because of its limits.
    """

    @property
    # Whether only an end token may follow.
    def is_finished(self) -> bool: ...

    def consume(self, token_ids: Tokens[int]) -> None: ...

    def mask(self) -> bytes: ...

    def forced_tokens(self, most: int) -> Tokens[int]: ...

    def copy(self) -> "FollowedGrammar": ...


class GrammarConstraint:
    """Follows one sequence's tokens in its grammar; implements `core.sequence.Constraint`.

    Invariant: `_early`, if not None, computes the mask after all present tokens.
    """

    __slots__ = (
        "_clock",
        "_early",
        "_ends",
        "_failure",
        "_is_slow",
        "_num_tokens",
        "_params",
        "_state",
        "ends_with_text",
        "error",
    )

    def __init__(
        self,
        state: FollowedGrammar,
        params: DecodingParams,
        end_token_ids: Tokens[int],
        token_ids: Tokens[int] = (),
        clock: Callable[[], float] = time.thread_time,
    ) -> None:
        """The constraint changes `state`, so the caller must not use it again. `end_token_ids` are
        all end tokens of the model. `token_ids` were generated before, by this sequence or by the
        parent that it was forked from. `clock` returns the thread's seconds of processor time.

        Raises ValueError if token_ids don't obey the grammar.
        """
        state.consume(token_ids)
        self.error: str | None = None
        self.ends_with_text = False
        self._state = state
        self._params = params
        self._ends = frozenset(end_token_ids)
        self._num_tokens = len(token_ids)
        self._early: Future[bytes | None] | None = None
        self._is_slow = False
        self._clock = clock
        # Number of tokens after which no mask for drafts could be computed, and the error.
        self._failure: tuple[int, str] | None = None

    @property
    def is_ready(self) -> bool:
        """Whether the next mask will be ready in time."""
        return self._early is None or self._early.done()

    @property
    def early(self) -> "Future[bytes | None] | None":
        """The mask that was begun before its step was planned, or None."""
        return self._early

    def accept_token(self, token_id: int) -> bool:
        """See `Constraint.accept_token`."""
        self._early = None
        if self._failure is not None and self._failure[0] == self._num_tokens:
            self.error = self._failure[1]
        self._num_tokens += 1
        if self.error is not None:
            return True
        if token_id in self._ends or self._state.is_finished:
            return True
        try:
            self._state.consume((token_id,))
        except ValueError as error:
            self.error = str(error)
            return True
        self.ends_with_text = self._state.is_finished
        return self.ends_with_text

    def allowed_prefix(self, token_ids: Tokens[int]) -> int:
        """See `Constraint.allowed_prefix`. 0 after a slow mask: several would delay the step,
        and a mask that was begun early comes alone."""
        if self._is_slow or self._early is not None or self.error is not None:
            return 0
        state = self._state.copy()
        for count, token_id in enumerate(token_ids):
            if token_id in self._ends:
                return count
            try:
                state.consume((token_id,))
            except ValueError:
                return count
            if state.is_finished:
                return count
        return len(token_ids)

    def forced_tokens(self, most: int) -> Tokens[int]:
        """See `Constraint.forced_tokens`. Empty where `allowed_prefix` is 0 for any drafts."""
        if self._is_slow or self._early is not None or self.error is not None:
            return ()
        return self._state.forced_tokens(most)

    def begin_early(self, threads: Executor) -> None:
        """Begin the next mask now, if the last one was slow."""
        if self._is_slow and self._early is None and self.error is None:
            self._early = threads.submit(self.mask)

    def mask(self) -> bytes | None:
        """The tokens that may come next, as a mask of `core.step.TokenMasks`.

        None after an error, which ends the sequence whatever is sampled for it. Called in a thread,
        one call at a time.
        """
        began_s, self._failure = self._clock(), None
        try:
            mask = self._state.mask()
        except ValueError as error:
            self.error = str(error)
            return None
        self._is_slow = self._clock() - began_s > SLOW_MASK_S
        return self._without_ends(mask, self._num_tokens)

    def masks(self, draft_token_ids: Tokens[int]) -> tuple[bytes, ...] | None:
        """`mask`, and the tokens that may follow each of the drafts, which the grammar allows.

        If the grammar can't be followed after a draft, all tokens are allowed from there on, and
        the sequence ends with an error if it gets there.
        """
        first = self.mask()
        if first is None or not draft_token_ids:
            return None if first is None else (first,)
        masks, state = [first], self._state.copy()
        for num_tokens, token_id in enumerate(draft_token_ids, self._num_tokens + 1):
            try:
                state.consume((token_id,))
                masks.append(self._without_ends(state.mask(), num_tokens))
            except ValueError as error:
                self._failure = num_tokens, str(error)
                masks += [b"\xff" * len(first)] * (1 + len(draft_token_ids) - len(masks))
                break
        return tuple(masks)

    def copy(self, params: DecodingParams) -> "GrammarConstraint":
        """The constraint of a sequence with the same tokens and other params."""
        if self._early is not None:
            self._early.result()
        copied = GrammarConstraint(self._state.copy(), params, tuple(self._ends), clock=self._clock)
        copied.error, copied._num_tokens = self.error, self._num_tokens
        copied._is_slow = self._is_slow
        return copied

    def _without_ends(self, mask: bytes, num_tokens: int) -> bytes:
        """Remove end tokens that may not come yet (min_tokens) from the mask after num_tokens
        generated tokens, if other tokens are left.

        With ignore_eos, the model's end tokens are always removed.
        """
        params = self._params
        put_off: Iterable[int] = ()
        if num_tokens < params.min_tokens:
            put_off = chain(self._ends, params.stop_token_ids)
        elif not params.end_token_ids:
            put_off = self._ends
        size = 8 * len(mask)
        allowed = [each for each in put_off if each < size and mask[each // 8] >> each % 8 & 1]
        if not allowed:
            return mask
        edited = bytearray(mask)
        for token_id in allowed:
            edited[token_id // 8] &= ~(1 << token_id % 8)
        return bytes(edited) if any(edited) else mask


RowMasks = tuple[bytes, ...] | None
"""The result of `GrammarConstraint.masks`."""


class PendingMasks:
    """The masks of one step while they are computed."""

    def __init__(
        self, jobs: list[Future[list[RowMasks]]], rows: list[list[int]], early: "EarlyMasks"
    ) -> None:
        """`jobs` and `rows` are parallel: each job computes the masks of its rows. `early` has the
        rows whose masks were begun before the step was planned."""
        self._jobs = jobs
        self._rows = rows
        self._early = early

    def collect(self) -> TokenMasks | None:
        """Wait for all masks and return them; None if the step has none."""
        if not self._jobs and not self._early:
            return None
        masks: dict[int, tuple[bytes, ...]] = {}
        for job, rows in zip(self._jobs, self._rows, strict=True):
            for row, found in zip(rows, job.result(), strict=True):
                if found is not None:
                    masks[row] = found
        for row, computed in self._early:
            mask = computed.result()
            if mask is not None:
                masks[row] = (mask,)
        return masks or None


EarlyMasks = list[tuple[int, Future[bytes | None]]]
NO_MASKS = PendingMasks([], [], [])


def compute_masks(found: Iterable[tuple[GrammarConstraint, tuple[int, ...]]]) -> list[RowMasks]:
    """Compute the masks of several constraints with their drafts, one after another."""
    return [constraint.masks(drafts) for constraint, drafts in found]
