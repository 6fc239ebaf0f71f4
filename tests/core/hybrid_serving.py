"""A scheduler over groups of unlike growth, answered without a runner: every token is a number."""

from collections.abc import Sequence as Ids
from typing import Any

from quire.core.kv_groups import KVGroup, KVKind
from quire.core.memory.kv_cache_manager import KVCacheConfig, KVCacheManager
from quire.core.sampling_params import DecodingParams
from quire.core.scheduling import invariants
from quire.core.scheduling.options import SchedulerConfig
from quire.core.scheduling.scheduler import Scheduler
from quire.core.sequence import Sequence
from quire.core.step import StepPlan, StepResult

PAGE = 64
FULL = KVGroup((0,), KVKind.FULL, PAGE)


def window(size: int) -> KVGroup:
    return KVGroup((1,), KVKind.WINDOW, PAGE, size)


def state(num_blocks: int) -> KVGroup:
    return KVGroup((2,), KVKind.STATE, PAGE, None, num_blocks)


class Serving:
    """An engine's loop without overlap; the laws of accounting are checked at every call."""

    def __init__(
        self,
        *groups: KVGroup,
        num_blocks: int = 256,
        block_size: int = 4,
        budget: int = 64,
        max_num_seqs: int = 8,
        caching: bool = True,
        num_lookahead_blocks: int = 0,
    ) -> None:
        config = KVCacheConfig(groups, num_blocks, block_size, caching, b"secret")
        self.memory = KVCacheManager(config)
        limits = SchedulerConfig(max_num_seqs, budget, num_lookahead_blocks)
        self.scheduler = Scheduler(limits, self.memory)
        self._num_added = 0

    def add(
        self, prompt: Ids[int], max_tokens: int = 4, n: int = 1, **params: Any
    ) -> list[Sequence]:
        self._num_added += 1
        root = self.memory.prefixes.start_chain("")
        branches = [
            Sequence(
                str(self._num_added),
                list(prompt),
                DecodingParams(max_tokens, **params),
                branch_index=index,
                chain_root=root,
            )
            for index in range(n)
        ]
        self.scheduler.add(branches)
        return branches

    def plan(self) -> StepPlan | None:
        plan = self.scheduler.schedule(0.0)
        invariants.check_scheduler(self.scheduler)
        return plan

    def answer(self, plan: StepPlan) -> None:
        """Every row that closes its gap gets a token."""
        step = next(step for step in self.scheduler._in_flight if step.step_id == plan.step_id)
        rows = list(step.plain.rows)
        rows += [
            row
            for row, (sequence, _, num_computed) in step.rows.items()
            if num_computed >= len(sequence.token_ids)
        ]
        tokens = [(1 + (37 * plan.step_id + row) % 499,) for row in rows]
        self.scheduler.apply(StepResult(plan.step_id, rows, tokens))
        invariants.check_scheduler(self.scheduler)

    def step(self) -> StepPlan:
        plan = self.plan()
        assert plan is not None
        self.answer(plan)
        return plan

    def run(self) -> int:
        """To the end of all; returns the steps."""
        num_steps = 0
        while self.scheduler.has_unfinished:
            self.step()
            num_steps += 1
        invariants.check_idle(self.scheduler)
        return num_steps

    def serve(self, prompt: Ids[int], max_tokens: int = 4) -> Sequence:
        """One request, to its end."""
        sequence = self.add(prompt, max_tokens)[0]
        self.run()
        return sequence


def tokens(count: int, seed: int = 1) -> list[int]:
    """A prompt unlike that of any other seed from its first token on."""
    return [1 + (seed * 7919 + 31 * place) % 9973 for place in range(count)]
