"""A simulated replica: the real engine on a virtual clock, with a cost model's times.

No model is computed. Every sampled token is 0, and a sequence ends at its length in the trace.
Unlike `simulation.simulator`, this module checks no invariants, so that simulating a fleet with
thousands of requests takes only minutes.
"""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from dataclasses import dataclass
from itertools import repeat

from quire.core.kv_groups import KVGroup, KVKind
from quire.core.memory.eviction import DEFAULT_ORDER
from quire.core.request import Request, SequenceOutput
from quire.core.sampling_params import DecodingParams
from quire.core.scheduling.cost_model import StepCostModel
from quire.core.scheduling.pacing import PacingConfig, StepPacer
from quire.routing.replica import ReplicaFacts
from quire.simulation.planned_work import PlannedWork
from quire.simulation.virtual_engine import VOCABULARY, EngineShape, VirtualEngine

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
    """A replica, which is also the costs of its engine.

    Invariant: while a step is in flight, the engine's clock is at its end, and `end_step` returns
    its outputs.
    """

    def __init__(self, name: str, shape: ReplicaShape, secret: bytes) -> None:
        self.name = name
        self.is_busy = False
        # The real seconds of all steps, and the seconds that the cost model predicts for them.
        self.busy_s = self.told_s = 0.0
        self._costs, self._slowness = shape.costs, shape.slowness
        pacer = None
        if shape.max_itl_ratio:
            # The pacer's model learns, while the router's remains as reported.
            learning = StepCostModel(shape.costs.coefficients)
            pacer = StepPacer(PacingConfig(shape.max_itl_ratio), learning)
        self._virtual: VirtualEngine[None] = VirtualEngine(
            EngineShape(
                groups=(GROUP,),
                num_blocks=shape.num_blocks,
                block_size=shape.block_size,
                max_model_len=VOCABULARY,
                max_num_seqs=shape.max_num_seqs,
                max_num_batched_tokens=shape.max_num_batched_tokens,
                eviction=shape.eviction,
            ),
            self,
            pacer=pacer,
            tokens=repeat(0),
            secret=secret,
        )
        self._outputs: list[SequenceOutput] = []

    def add(
        self, request_id: str, token_ids: Tokens[int], num_output_tokens: int, now_s: float
    ) -> None:
        """Add a request. Raises RequestNeverFitsError if it is too long for the pool."""
        self._virtual.clock.wait_until(now_s)
        self._virtual.add(Request(request_id, token_ids, DecodingParams(num_output_tokens)))

    @property
    def has_work(self) -> bool:
        """Whether a request has not ended."""
        return self._virtual.engine.has_work()

    def begin_step(self, now_s: float) -> float | None:
        """Begin the next step; returns the time at which it ends, or None if no step is planned."""
        virtual = self._virtual
        if not self.has_work:
            return None
        virtual.clock.wait_until(now_s)
        self._outputs, self.is_busy = virtual.engine.step(), True
        return virtual.clock.now_s

    def end_step(self) -> list[SequenceOutput]:
        """End the step in flight; returns its outputs."""
        self.is_busy = False
        return self._outputs

    def step_s(self, work: PlannedWork) -> float:
        """See `VirtualCosts`."""
        told_s = self._costs.predict_s(work.load)
        self.busy_s += self._slowness * told_s
        self.told_s += told_s
        return self._slowness * told_s

    def ending_s(self, num_ended: int, num_ended_tokens: int) -> float:
        """See `VirtualCosts`."""
        return 0.0
