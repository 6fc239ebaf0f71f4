"""A model's runner that also counts what its steps would cost on another device.

Tokens, and so the survivors of a beam search, are the model's own; the virtual clock moves as a
`StepCost` says, as in `length_runner`, where no model computes. Copies of blocks cost what reading
and writing their tokens takes. Used by `benchmarks.claims.beam_speed`.
"""

from benchmarks.memory.length_runner import StepCost, VirtualClock
from quire.core.step import Runner, StepPlan, StepResult, TokenMasks


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
        self._contexts: dict[int, int] = {}  # row -> computed tokens

    def execute(self, plan: StepPlan) -> None:
        """See `Runner`."""
        self._inner.execute(plan)
        num_context = self._count_context(plan)
        self.num_copied_blocks += len(plan.copies)
        copies_s = self._copy_s * len(plan.copies)
        self._clock.advance(self._cost.seconds(plan.num_tokens, num_context) + copies_s)

    def _count_context(self, plan: StepPlan) -> int:
        """Tokens in the contexts of the rows that compute, each row's counted."""
        contexts = self._contexts
        for row in plan.release:
            del contexts[row]
        for admission in plan.admit:
            contexts[admission.row] = admission.num_computed_tokens
        for fork in plan.forks:
            assert not fork.joins_step, "joining forks take their source's state after the step"
            contexts[fork.row] = contexts[fork.source_row]
        chunks = dict(plan.chunks)
        num_context = 0
        for row in contexts:
            num_new_tokens = chunks.get(row, 1)
            if num_new_tokens:
                contexts[row] += num_new_tokens
                num_context += contexts[row]
        return num_context

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
        self._contexts.clear()
        self._inner.reset()
