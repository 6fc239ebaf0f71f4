"""Tells, before each step runs, which requests are in it.

Knows sequences, not who listens. Called by `engine`; `engine_main` listens, so that the front
can read after a death whose step it was.
"""

from collections.abc import Callable, Collection, Iterable
from typing import TypeAlias

from quire.core.sequence import Sequence
from quire.core.step import StepPlan

OnStep: TypeAlias = Callable[[Collection[str] | None], None]
"""Called when a step has been planned and is about to run: with the ids of the requests in it and,
with overlap, in the step before it; None: the same as at the last call."""


class StepWatcher:
    """Invariant: `_last` are the requests of the last step, and nothing is looked up for a step in
    which, as in those before it, all rows decode."""

    def __init__(self, on_step: OnStep) -> None:
        self.on_step = on_step
        self._last: set[str] = set()
        self._num_alike = 0  # plans that change no row, one after the other, up to the last

    def launch(self, plan: StepPlan, running: Iterable[Sequence], *, is_overlapping: bool) -> None:
        """running: all that have a row. is_overlapping: the step before may not have ended."""
        changes_rows = plan.admit or plan.release or plan.forks or plan.chunks
        self._num_alike = 0 if changes_rows else self._num_alike + 1
        # After the last change a row goes on that had paused; and with overlap, one that has left
        # is in flight for one step more.
        if self._num_alike > 2:
            self.on_step(None)
            return
        paused = {chunk.row for chunk in plan.chunks if not chunk.num_new_tokens}
        named = {sequence.request_id for sequence in running if sequence.row not in paused}
        self.on_step(named | self._last if is_overlapping else named)
        self._last = named
