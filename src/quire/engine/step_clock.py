"""Steps under way: how long each takes, and which requests are in it.

A step that was launched while another ran begins when that one has ended, so its time is counted
from there. Reads no clock: the times are given. Used by `engine` alone.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from quire.core.scheduling.cost_model import (
    NO_LOAD,
    StepLoad,
)
from quire.core.sequence import Sequence
from quire.core.step import StepPlan
from quire.observability.step_trace import StepRecord, StepTiming

OnStep: TypeAlias = Callable[[Collection[str] | None], None]
"""Called when a step has been planned and is about to run, with what `StepMembers.launch` says."""


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """began_s: when its planning began. schedule_s: how long that took. timing: of its launch.
    num_waiting, num_preemptions: sequences without a row after planning; preemptions by it.
    load: what it computes."""

    plan: StepPlan
    began_s: float
    schedule_s: float
    timing: StepTiming
    num_waiting: int
    num_preemptions: int
    load: StepLoad = NO_LOAD

    @property
    def launched_s(self) -> float:
        """When its batch was built: what follows is work of the device, or of all cores."""
        return self.began_s + self.schedule_s + self.timing.build_s

    def record(
        self, landing: "Landing", *, apply_s: float, elapsed_s: float, num_blocks_used: int
    ) -> StepRecord:
        """Its line in the step trace; the arguments are as there."""
        plan, timing = self.plan, self.timing
        return StepRecord(
            step_id=plan.step_id,
            num_rows=plan.num_rows,
            num_tokens=plan.num_tokens,
            num_prefill_tokens=sum(chunk.num_new_tokens for chunk in plan.chunks),
            num_waiting=self.num_waiting,
            schedule_s=self.schedule_s,
            build_s=timing.build_s,
            plan_s=timing.plan_s,
            forward_s=timing.forward_s,
            sample_s=timing.sample_s,
            wait_s=landing.wait_s,
            apply_s=apply_s,
            elapsed_s=elapsed_s,
            num_blocks_used=num_blocks_used,
            num_preemptions=self.num_preemptions,
            busy_s=landing.busy_s,
            gap_s=landing.gap_s,
        )


class Landing(NamedTuple):
    """When a step's result came, and how long it was waited for. busy_s, gap_s: of the time since
    the result before it, or since there was work; see `utilization`."""

    fetched_s: float
    wait_s: float
    busy_s: float
    gap_s: float


class StepClock:
    """Steps that were launched and have no result yet, in the order of their launch. All times are
    of one clock, in seconds."""

    def __init__(self) -> None:
        self._steps: deque[LaunchedStep] = deque()
        self._ended_s = self._left_s = float("-inf")
        self._away_s = 0.0

    def __len__(self) -> int:
        return len(self._steps)

    def enter(self, now_s: float) -> None:
        """`Engine.step` begins. Time between two calls of it is not charged to a step."""
        self._away_s = now_s - self._left_s if self._steps else 0.0

    def leave(self, now_s: float) -> None:
        """`Engine.step` ends."""
        self._left_s = now_s

    def launch(self, step: LaunchedStep) -> None:
        """A step that runs after those that run already."""
        self._steps.append(step)

    def land(self) -> LaunchedStep:
        """The oldest step, whose result has come."""
        return self._steps.popleft()

    def drop(self) -> None:
        """Forget all steps: no results will come."""
        self._steps.clear()

    def end(self, step: LaunchedStep, now_s: float) -> tuple[float, bool]:
        """How long the step took until its result was taken in, and whether that is exact: not if
        most of the time passed between two calls of `Engine.step`, which is then left out."""
        elapsed_s = now_s - max(step.began_s, self._ended_s)
        self._ended_s = now_s
        if 2 * self._away_s > elapsed_s:
            return max(0.0, elapsed_s - self._away_s), False
        return elapsed_s, True


class StepMembers:
    """Which requests are in the steps that run, so that the front can read after a death whose
    step it was.

    Invariant: `_last` are the requests of the last step, and nothing is looked up for a step in
    which, as in those before it, all rows decode.
    """

    def __init__(self) -> None:
        self._last: set[str] = set()
        self._num_alike = 0  # plans that change no row, one after the other, up to the last

    def launch(
        self, plan: StepPlan, running: Iterable[Sequence], *, is_overlapping: bool
    ) -> set[str] | None:
        """The ids of the requests in the step that is about to run and, with overlap, in the step
        before it; None: the same as at the last call. running: all sequences that have a row.
        is_overlapping: the step before may not have ended."""
        changes_rows = plan.admit or plan.release or plan.forks or plan.chunks
        self._num_alike = 0 if changes_rows else self._num_alike + 1
        # After the last change a row goes on that had paused; and with overlap, one that has left
        # is in flight for one step more.
        if self._num_alike > 2:
            return None
        paused = {chunk.row for chunk in plan.chunks if not chunk.num_new_tokens}
        named = {sequence.request_id for sequence in running if sequence.row not in paused}
        last, self._last = self._last, named
        return named | last if is_overlapping else named
