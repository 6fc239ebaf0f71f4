"""Steps that were launched and have no result yet: what to remember of each, how long each took.

A step that was launched while another ran begins when that one has ended; so its time is counted
from there. Knows no sequences and reads no clock. Used by `engine` alone.
"""

from collections import deque
from dataclasses import dataclass

from quire.core.step import StepPlan
from quire.observability.step_trace import StepRecord, StepTiming


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """began_s: when its planning began. schedule_s: how long that took. timing: of its launch.
    num_waiting, num_preemptions: sequences without a row after planning; preemptions by it."""

    plan: StepPlan
    began_s: float
    schedule_s: float
    timing: StepTiming
    num_waiting: int
    num_preemptions: int

    def record(
        self, *, wait_s: float, apply_s: float, elapsed_s: float, num_blocks_used: int
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
            wait_s=wait_s,
            apply_s=apply_s,
            elapsed_s=elapsed_s,
            num_blocks_used=num_blocks_used,
            num_preemptions=self.num_preemptions,
        )


class StepsInFlight:
    """In the order of their launch. All times are of one clock, in seconds."""

    def __init__(self) -> None:
        self._steps: deque[LaunchedStep] = deque()
        self._ended_s = self._left_s = float("-inf")
        self._away_s = 0.0

    def __len__(self) -> int:
        return len(self._steps)

    def enter(self, now_s: float) -> None:
        """The engine's caller is here again."""
        self._away_s = now_s - self._left_s if self._steps else 0.0

    def leave(self, now_s: float) -> None:
        """The engine's caller does something else for a while."""
        self._left_s = now_s

    def launch(self, step: LaunchedStep) -> None:
        """It runs after those that do already."""
        self._steps.append(step)

    def land(self) -> LaunchedStep:
        """The oldest, whose result has come."""
        return self._steps.popleft()

    def drop(self) -> None:
        """No result will come."""
        self._steps.clear()

    def end(self, step: LaunchedStep, now_s: float) -> tuple[float, bool]:
        """How long the step took until its result was taken in, and whether that is known: not if
        the caller was away for most of the time, who counts no further."""
        elapsed_s = now_s - max(step.began_s, self._ended_s)
        self._ended_s = now_s
        if 2 * self._away_s > elapsed_s:
            return max(0.0, elapsed_s - self._away_s), False
        return elapsed_s, True
