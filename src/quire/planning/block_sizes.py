"""Chooses the block size for a model and a load.

The load is simulated with each size on the virtual clock, with the same number of bytes of KV
memory. Prefix cache hits, unused slots and preemptions come from the real memory management. Two
costs are measured for each size: the time of attention with such blocks, and the host's time per
block for its hash and its table entry.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import log2

from quire.assembly.model_kind import ModelKind
from quire.assembly.reports.attention_speed import AttentionSpeed, measure_attention
from quire.core.kv_groups import KVGroup, KVKind
from quire.core.scheduling.cost_model import StepCostModel, StepLoad, StepSample
from quire.errors import InsufficientMemoryError
from quire.options.engine_options import EngineOptions
from quire.planning.load import LengthLoad, LoadRequest, at_once, draw_lengths
from quire.planning.step_costs import BlockFactors, StepCosts
from quire.planning.virtual_run import RunOutcome, run_virtually
from quire.simulation.planned_work import PlannedWork
from quire.simulation.virtual_engine import EngineShape

SIZES = tuple(1 << power for power in range(3, 12))
DEFAULT = 16
#: Rates that differ by less than this share count as equal. Among equal rates, the size nearest to
#: DEFAULT is chosen.
EQUAL_SHARE = 0.01
_HOST_SIZES = (8, 128)
_HOST_LOAD = LengthLoad((1024, 1024), (1, 1), None, 16)
_HOST_ROUNDS = 5


@dataclass(frozen=True, slots=True)
class SizeOutcome:
    """The result of one block size when all requests of the load arrive at once."""

    block_size: int
    #: The run with this block size; None if it can't be served.
    outcome: RunOutcome | None
    #: The effects of the block size on the measured step times; None if it can't be served.
    factors: BlockFactors | None = None
    #: The reason why the size can't be served; None if it can.
    obstacle: str | None = None

    @property
    def rate(self) -> float:
        """Requests per second; 0 if the size can't be served."""
        return 0.0 if self.outcome is None else self.outcome.requests_per_s

    @property
    def num_refused(self) -> int:
        """Number of requests that do not fit into the KV cache even when they run alone."""
        return 0 if self.outcome is None else self.outcome.num_refused


def try_sizes(
    options: EngineOptions,
    kind: ModelKind,
    costs: StepCosts,
    shape: Callable[[EngineOptions], EngineShape],
    load: Sequence[LoadRequest],
) -> list[SizeOutcome]:
    """Simulate the load with each of SIZES.

    `options` must not set num_blocks, because the bytes of a block depend on its size. `costs` were
    measured at `options.block_size`. `shape` returns the engine's shape for given options.
    """
    sizes = sorted({*SIZES, options.block_size})
    speeds = measure_attention(options, kind, sizes)
    block_s = host_block_s()
    found: list[SizeOutcome] = []
    for size in SIZES:
        try:
            changed = shape(replace(options, block_size=size))
        except InsufficientMemoryError as error:
            found.append(SizeOutcome(size, None, None, str(error)))
            continue
        factors = _factors(speeds, size, options.block_size, block_s)
        changed_costs = costs.with_blocks(factors, is_even=True)  # chance must not decide
        outcome = run_virtually(at_once(load), changed, changed_costs)
        found.append(SizeOutcome(size, outcome, factors))
    return found


def choose_size(found: Sequence[SizeOutcome]) -> int:
    """Choose the size with the highest rate of those that refuse the fewest requests.

    Of sizes with equal rates, the one nearest to DEFAULT is chosen, then the smaller one.
    """
    fewest = min((each.num_refused for each in found if each.outcome is not None), default=0)
    able = [each for each in found if each.num_refused == fewest]
    most = max(each.rate for each in able)
    equal = [each.block_size for each in able if each.rate >= (1 - EQUAL_SHARE) * most]
    return min(equal, key=lambda size: (abs(log2(size) - log2(DEFAULT)), size))


def host_block_s(clock: Callable[[], float] = time.process_time) -> float:
    """The host's seconds for each additional block.

    It is the difference between running prompts with small and with large blocks, in turns. Only
    the scheduler and the memory manager run.
    """
    load = draw_lengths(_HOST_LOAD)
    rounds: list[list[float]] = []
    for _ in range(_HOST_ROUNDS):
        times: list[float] = []
        for size in _HOST_SIZES:
            began_s = clock()
            run_virtually(load, _host_shape(size), _FreeCosts())
            times.append(clock() - began_s)
        rounds.append(times)
    taken = [min([times[at] for times in rounds]) for at in range(len(_HOST_SIZES))]
    num_tokens = _HOST_LOAD.num_requests * _HOST_LOAD.prompt[0]
    num_more = num_tokens // _HOST_SIZES[0] - num_tokens // _HOST_SIZES[1]
    return max(0.0, (taken[0] - taken[1]) / num_more)


def _factors(
    speeds: dict[int, AttentionSpeed], size: int, base: int, block_s: float
) -> BlockFactors:
    if not speeds:
        return BlockFactors(1.0, 1.0, block_s, base)
    mine, other = speeds[size], speeds[base]
    return BlockFactors(mine.decode_s / other.decode_s, mine.chunk_s / other.chunk_s, block_s, base)


def _host_shape(block_size: int) -> EngineShape:
    return EngineShape(
        groups=(KVGroup((0,), KVKind.FULL, 64),),
        num_blocks=4 * 1024 * 16 // block_size,
        block_size=block_size,
        max_model_len=2048,
        max_num_seqs=16,
        max_num_batched_tokens=2048,
    )


class _FreeCosts:
    """Implements `virtual_run.Costs` for steps that take no time."""

    def predict_s(self, work: PlannedWork) -> float:
        """See `Costs`."""
        return 0.0

    def deviation(self, work: PlannedWork, predicted_s: float, place: float) -> float:
        """See `Costs`."""
        return 1.0

    def ending_s(self, num_ended: int, num_ended_tokens: int) -> float:
        """See `Costs`."""
        return 0.0

    def pacing_model(self) -> StepCostModel:
        """See `Costs`. All steps take equally long, so no chunk is shortened."""
        return StepCostModel.fit([StepSample(StepLoad(1, 1), 1.0)])
