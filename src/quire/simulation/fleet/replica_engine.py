"""A simulated replica: the real scheduler and memory, with step times from a cost model.

No model is computed. Every sampled token is 0, and a sequence ends at its length in the trace.
Unlike `simulation.simulator`, this module checks no invariants, so that simulating a fleet with
thousands of requests takes only minutes.
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
    """The sizes and costs of a replica."""

    num_blocks: int
    block_size: int
    #: The step cost model that the replica reports to the router.
    costs: StepCostModel
    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 64
    #: The bound of the replica's pacing (`PacingConfig.max_itl_ratio`); 0 means no pacing.
    max_itl_ratio: float = 0.0
    #: The eviction order of the replica's prefix cache.
    eviction: str = DEFAULT_ORDER
    #: The ratio of the replica's real step times to those that `costs` predicts.
    slowness: float = 1.0

    @property
    def facts(self) -> ReplicaFacts:
        """The facts that the replica reports to the router."""
        return ReplicaFacts(
            self.num_blocks, self.costs, self.max_num_batched_tokens, self.max_num_seqs
        )


class SimulatedReplica:
    """A replica whose steps `begin_step` plans and `end_step` applies. At most one step is in
    flight."""

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
            # The pacer's model learns, while the router's remains as reported.
            learning = StepCostModel(shape.costs.coefficients)
            self.scheduler.pacer = StepPacer(PacingConfig(shape.max_itl_ratio), learning)
        # The real seconds of all steps, and the seconds that the cost model predicts for them.
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
        """Add a request. Raises RequestNeverFitsError if it is too long for the pool."""
        root = self.memory.prefixes.start_chain("")
        params = DecodingParams(max_tokens=num_output_tokens)
        self.scheduler.add([Sequence(request_id, token_ids, params, chain_root=root)], now_s)

    def begin_step(self, now_s: float) -> float | None:
        """Plan the next step; returns the time at which it ends, or None if no step is planned."""
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
        """End the step in flight; returns its outputs."""
        plan = self._plan
        assert plan is not None
        self._plan = None
        rows = self._rows.sample()
        self.num_generated_tokens += len(rows)
        outputs = self.scheduler.apply(StepResult(plan.step_id, rows, [(0,)] * len(rows)))
        self.scheduler.pacer.observe(plan.step_id, self._step_s)
        return outputs


class _Rows:
    """Tracks the rows of a runner, to find the rows that sample and the work of each step.

    Invariant: for each live row, `_computed` has the number of computed tokens and `_missing` the
    number of tokens that are not computed.
    """

    def __init__(self, num_rows: int) -> None:
        self._computed = [0] * num_rows
        self._missing = [0] * num_rows
        self._live: dict[int, None] = {}
        self._num_pairs = 0  # sum of the computed tokens of all live rows
        self._sampling: list[int] = []

    def execute(self, plan: StepPlan) -> StepLoad:
        """Apply a plan; returns the load of its step."""
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
        """The rows that sample in the last executed step."""
        return self._sampling
