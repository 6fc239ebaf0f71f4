"""A model's runner that also counts what its steps would cost on another device.

Tokens, and so the survivors of a beam search, are the model's own; the virtual clock moves as a
`StepCost` says, as where no model computes. Copies of blocks cost what reading
and writing their tokens takes. Used by `benchmarks.claims.beam_speed`.
"""

from benchmarks.memory.step_cost import StepCost
from quire.core.step import Runner, StepPlan, StepResult, TokenMasks
from quire.simulation.planned_work import PlannedWorkCounter
from quire.simulation.virtual_engine import VirtualClock


class TimedRunner:
    """Implements `core.step.Runner`: passes everything on to the runner inside.

    num_copied_blocks, num_sampled_rows: over all steps so far.
    """

    def __init__(self, inner: Runner, cost: StepCost, clock: VirtualClock, block_size: int) -> None:
        self.num_copied_blocks = 0
        self.num_sampled_rows = 0
        self._inner = inner
        self._cost = cost
        self._clock = clock
        self._copy_s = 2 * block_size * cost.context_token_s
        self._work = PlannedWorkCounter(block_size)

    def execute(self, plan: StepPlan) -> None:
        """See `Runner`."""
        self._inner.execute(plan)
        self.num_copied_blocks += len(plan.copies)
        step_s = self._cost.step_s(self._work.count(plan))
        self._clock.now_s += step_s + self._copy_s * len(plan.copies)

    def sample(self, masks: TokenMasks | None = None) -> None:
        """See `Runner`."""
        self._inner.sample(masks)

    def result(self) -> StepResult:
        """See `Runner`."""
        result = self._inner.result()
        self.num_sampled_rows += len(result.rows)
        return result

    def reset(self) -> None:
        """See `Runner`."""
        self._work.reset()
        self._inner.reset()
