"""Measures how long each step takes, and records which requests are in it.

A step that was launched while another step ran begins when that step has ended, so its time is
counted from then on. Reads no clock: callers pass the time. Used by `engine` alone.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple, TypeAlias

from quire.core.scheduling.cost_model import (
    NO_LOAD,
    StepLoad,
)
from quire.core.sequence import Sequence
from quire.core.step import StepPlan, StepResult
from quire.observability.step_trace import StepRecord, StepTiming

OnStep: TypeAlias = Callable[[Collection[str] | None, float], None]
"""Called before a planned step runs, with the result of `StepMembers.launch` and the predicted
seconds of all steps in flight, including this step (0 if unknown)."""


class LaunchedStep(NamedTuple):
    """A step with the measurements of its planning and launch."""

    plan: StepPlan
    #: Engine time at which the step's planning began.
    began_s: float
    #: Duration of the planning, in seconds.
    schedule_s: float
    #: Timing of the step's launch.
    timing: StepTiming
    #: Number of sequences without a row after planning.
    num_waiting: int
    #: Number of preemptions that its planning caused.
    num_preemptions: int
    load: StepLoad = NO_LOAD
    #: Duration of the drafter's work for the step, in seconds.
    draft_s: float = 0.0
    #: Duration in seconds that was predicted before the launch; 0 if unknown.
    predicted_s: float = 0.0

    @property
    def launched_s(self) -> float:
        """Engine time at which its batch was built; from then on the device, or all cores, work on
        it."""
        return self.began_s + self.schedule_s + self.timing.build_s

    def count_drafts(self, result: StepResult) -> tuple[int, int]:
        """(accepted, rejected) numbers of the step's drafts."""
        num_drafts = self.plan.num_drafts
        if not num_drafts:
            return 0, 0
        num_accepted = sum([len(token_ids) - 1 for token_ids in result.token_ids if token_ids])
        return num_accepted, num_drafts - num_accepted

    def record(
        self, landing: "Landing", *, apply_s: float, elapsed_s: float, num_blocks_used: int
    ) -> StepRecord:
        """The step's record in the step trace; the arguments are fields of `StepRecord`."""
        plan, timing = self.plan, self.timing
        return StepRecord(
            step_id=plan.step_id,
            num_rows=plan.num_rows,
            num_tokens=plan.num_tokens,
            num_prefill_tokens=plan.num_prefill_tokens,
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
            draft_s=self.draft_s,
        )


class Landing(NamedTuple):
    """The arrival of a step's result."""

    #: Engine time at which the result came.
    fetched_s: float
    #: Seconds that the engine waited for the result.
    wait_s: float
    #: Busy seconds since the previous result, or since work arrived; see `utilization`. gap_s is
    #: the rest of that time.
    busy_s: float
    gap_s: float
    #: Number of the step's drafts that were rejected, so that computing them was no use.
    num_rejected: int = 0


class StepClock:
    """Launched steps without a result, in the order of their launch. All times are engine time."""

    def __init__(self) -> None:
        self._steps: deque[LaunchedStep] = deque()
        self._ended_s = self._left_s = float("-inf")
        #: Time between the last two calls of `Engine.step`, if a step was in flight.
        self._away_s = 0.0

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def predicted_s(self) -> float:
        """The predicted seconds of all steps together."""
        return sum([step.predicted_s for step in self._steps])

    def begin_call(self, now_s: float) -> None:
        """Note that `Engine.step` begins. Time between two calls of it is not charged to a step."""
        self._away_s = now_s - self._left_s if self._steps else 0.0

    def end_call(self, now_s: float) -> None:
        """Note that `Engine.step` ends."""
        self._left_s = now_s

    def launch(self, step: LaunchedStep) -> None:
        """Add a step, which runs after those in flight."""
        self._steps.append(step)

    def pop_oldest(self) -> LaunchedStep:
        """Remove and return the oldest step, whose result has come."""
        return self._steps.popleft()

    def drop(self) -> None:
        """Forget all steps after a failure, since their results will not come."""
        self._steps.clear()

    def end(self, step: LaunchedStep, now_s: float) -> tuple[float, bool]:
        """The step's duration until its result was applied, and whether that is exact.

        The duration is not exact if most of it passed between two calls of `Engine.step`; that time
        is then left out.
        """
        elapsed_s = now_s - max(step.began_s, self._ended_s)
        self._ended_s = now_s
        if 2 * self._away_s > elapsed_s:
            return max(0.0, elapsed_s - self._away_s), False
        return elapsed_s, True


class StepMembers:
    """The requests in the running steps, so that an API server knows which requests were in a step
    that killed its engine.

    Invariant: `_last` holds the requests of the last step. If a step only decodes all rows, like
    the steps before it, no request is looked up.
    """

    def __init__(self) -> None:
        self._last: set[str] = set()
        self._num_alike = 0  # number of latest plans that changed no row

    def launch(
        self, plan: StepPlan, running: Iterable[Sequence], *, is_overlapping: bool
    ) -> set[str] | None:
        """The ids of the requests in the step that is about to run and, with overlap, in the step
        before.

        None: the ids are those of the last call. running: all sequences that have a row.
        is_overlapping: the step before may not have ended.
        """
        self._num_alike = self._num_alike + 1 if plan.only_decodes else 0
        # A change of rows affects the next steps, too: a paused row continues one step later, and
        # with overlap a released row is in flight for one more step.
        if self._num_alike > 2:
            return None
        paused = set(plan.paused_rows)
        named = {sequence.request_id for sequence in running if sequence.row not in paused}
        last, self._last = self._last, named
        return named | last if is_overlapping else named
