"""One replica: the real scheduler and memory, and steps that take what a cost model says.

Nothing is computed: every sampled token is 0, and a sequence ends at the length that its trace has.
The laws of scheduler and memory are checked by `simulation.simulator`; here only time counts, so
that a fleet with thousands of requests is simulated in minutes.
"""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from dataclasses import dataclass

from quire.core.kv_groups import KVGroup, KVKind
from quire.core.memory.eviction import DEFAULT_ORDER
from quire.core.memory.kv_cache_manager import KVCacheConfig, KVCacheManager
from quire.core.request import SequenceOutput
from quire.core.sampling_params import DecodingParams
from quire.core.scheduling.cost_model import StepCostModel, StepLoad
from quire.core.scheduling.options import SchedulerConfig
from quire.core.scheduling.pacing import PacingConfig, StepPacer
from quire.core.scheduling.scheduler import Scheduler
from quire.core.sequence import Sequence
from quire.core.step import StepPlan, StepResult
from quire.routing.replica import ReplicaFacts

GROUP = KVGroup((0,), KVKind.FULL, 1)


@dataclass(frozen=True, slots=True)
class ReplicaShape:
    """What a replica is made of. max_itl_ratio: of its pacing; 0: none. eviction: of its cache.
    slowness: how many times as long as `costs` says its steps take."""

    num_blocks: int
    block_size: int
    costs: StepCostModel
    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 64
    max_itl_ratio: float = 0.0
    eviction: str = DEFAULT_ORDER
    slowness: float = 1.0

    @property
    def facts(self) -> ReplicaFacts:
        """What the router is told."""
        return ReplicaFacts(
            self.num_blocks, self.costs, self.max_num_batched_tokens, self.max_num_seqs
        )


class SimulatedReplica:
    """Plans a step, takes the time that it takes, and takes in its result.

    busy_s: spent in steps; told_s: what these take by the cost model. num_computed_tokens,
    num_generated_tokens: by them.
    """

    def __init__(self, name: str, shape: ReplicaShape, secret: bytes) -> None:
        self.name = name
        self.costs = shape.costs
        self.memory = KVCacheManager(
            KVCacheConfig(
                (GROUP,),
                shape.num_blocks,
                shape.block_size,
                secret=secret,
                eviction=shape.eviction,
            )
        )
        config = SchedulerConfig(shape.max_num_seqs, shape.max_num_batched_tokens)
        self.scheduler = Scheduler(config, self.memory)
        if shape.max_itl_ratio:
            # A model of its own: it learns, while the router goes by what it was told.
            learning = StepCostModel(shape.costs.coefficients)
            self.scheduler.pacer = StepPacer(PacingConfig(shape.max_itl_ratio), learning)
        self.busy_s = self.told_s = 0.0
        self._slowness = shape.slowness
        self.num_computed_tokens = self.num_generated_tokens = 0
        self._rows = _Rows(shape.max_num_seqs)
        self._plan: StepPlan | None = None
        self._step_s = 0.0

    @property
    def is_busy(self) -> bool:
        """Whether a step is in flight."""
        return self._plan is not None

    def add(
        self, request_id: str, token_ids: Tokens[int], num_output_tokens: int, now_s: float
    ) -> None:
        """A request comes in. Raises RequestNeverFitsError where it is too long for the pool."""
        root = self.memory.prefixes.start_chain("")
        params = DecodingParams(max_tokens=num_output_tokens)
        self.scheduler.add([Sequence(request_id, token_ids, params, chain_root=root)], now_s)

    def begin_step(self, now_s: float) -> float | None:
        """Plan the next step; returns when it will have ended, or None where there is none."""
        plan = self.scheduler.schedule(now_s) if self.scheduler.has_unfinished else None
        if plan is None:
            return None
        load = self._rows.execute(plan)
        told_s = self.costs.predict_s(load)
        self._plan, self._step_s = plan, self._slowness * told_s
        self.busy_s += self._step_s
        self.told_s += told_s
        self.num_computed_tokens += plan.num_tokens
        return now_s + self._step_s

    def end_step(self) -> list[SequenceOutput]:
        """The step in flight has ended; what it brought."""
        plan = self._plan
        assert plan is not None
        self._plan = None
        rows = self._rows.sample()
        self.num_generated_tokens += len(rows)
        outputs = self.scheduler.apply(StepResult(plan.step_id, rows, [(0,)] * len(rows)))
        self.scheduler.pacer.observe(plan.step_id, self._step_s)
        return outputs


class _Rows:
    """The rows of a runner, as far as they say who samples and what a step costs.

    Invariant: `_missing` has for each live row how many of its tokens are not computed, and
    `_computed` how many are.
    """

    def __init__(self, num_rows: int) -> None:
        self._computed = [0] * num_rows
        self._missing = [0] * num_rows
        self._live: dict[int, None] = {}
        self._num_pairs = 0  # computed tokens of all live rows
        self._sampling: list[int] = []

    def execute(self, plan: StepPlan) -> StepLoad:
        """Do as the plan says; returns what it costs."""
        computed, missing, live = self._computed, self._missing, self._live
        for row in plan.release:
            self._num_pairs -= computed[row]
            del live[row]
        for entry in plan.admit:
            row = entry.row
            live[row] = None
            computed[row] = entry.num_computed_tokens
            missing[row] = len(entry.token_ids) - entry.num_computed_tokens
            self._num_pairs += entry.num_computed_tokens
        assert not plan.forks and not plan.token_edits, "traces have one branch a request"
        load, chunk_rows = StepLoad(), {}
        num_pairs = self._num_pairs
        for row, num_new in plan.chunks:
            chunk_rows[row] = num_new
            num_pairs -= computed[row]
            if num_new:
                load = load.with_chunk(computed[row], num_new)
        num_decodes = len(live) - len(chunk_rows)
        self._sampling = []
        for row in live:
            num_new = chunk_rows.get(row, 1)
            computed[row] += num_new
            missing[row] -= num_new
            if num_new and not missing[row]:
                self._sampling.append(row)
                missing[row] = 1
        self._num_pairs += load.num_chunk_tokens + num_decodes
        return load._replace(num_decodes=num_decodes, num_decode_pairs=num_pairs + num_decodes)

    def sample(self) -> list[int]:
        """The rows that close their gap in the step just executed."""
        return self._sampling
