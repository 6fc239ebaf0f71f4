"""Runs one load on each allocator, with equal KV slots.

Simulated: the real engine, scheduler and memory with a runner that only counts, on a virtual clock.
Or the real engine on a model, in wall time. `command` calls it with what the command line said.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from benchmarks.memory.load import Budget, MemoryLoad, draw_arrivals, make_memory_requests
from benchmarks.memory.meter import MemoryMeter, MemoryUse
from benchmarks.memory.step_cost import VOCAB_SIZE, StepCost, counting_runner
from quire.assembly.build import build_engine
from quire.bench.baselines.contiguous import PAGED, find_allocator
from quire.bench.workload import BenchRequest
from quire.core.kv_groups import KVGroup, KVKind
from quire.core.memory.kv_cache_manager import KVCacheConfig
from quire.core.request import Request
from quire.core.sampling_params import DecodingParams, ModelLimits
from quire.core.scheduling.options import SchedulerConfig
from quire.core.scheduling.policy import POLICIES
from quire.core.scheduling.scheduler import Scheduler
from quire.engine.engine import Engine
from quire.errors import StepFailedError
from quire.simulation.virtual_engine import VirtualClock

# Nothing depends on it in a simulation; that of OPT-13B at 16 tokens a block.
_BYTES_PER_BLOCK = 16 * 819_200
# A look at all slots takes about as long as the rest of a simulated step. Blocks fill in 16 steps.
_LEDGER_INTERVAL = 5


@dataclass(frozen=True, slots=True)
class Carried:
    """The results of one allocator's run.

    seconds_per_token: mean over requests of the time from arrival to end by the output's length;
    p99_seconds_per_token: its 99th percentile.
    duration_s: from the first arrival to the last end, on the clock of the run.
    """

    use: MemoryUse
    seconds_per_token: float
    p99_seconds_per_token: float
    duration_s: float
    num_steps: int
    num_preemptions: int
    num_recomputed_tokens: int


class Clock(Protocol):
    """A monotonic time, in seconds."""

    def __call__(self) -> float: ...

    def wait_until(self, at_s: float) -> None: ...


class WallClock:
    """Seconds since it was made."""

    def __init__(self) -> None:
        self._started_s = time.monotonic()

    def __call__(self) -> float:
        return time.monotonic() - self._started_s

    def wait_until(self, at_s: float) -> None:
        time.sleep(max(0.0, at_s - self()))


class ProcessorClock:
    """Seconds of processor time that this process took, in all its threads, since it was made.

    What other processes take does not move it. For loads that never wait for an arrival.
    """

    def __init__(self) -> None:
        self._started_s = time.process_time()

    def __call__(self) -> float:
        return time.process_time() - self._started_s

    def wait_until(self, at_s: float) -> None:
        assert at_s <= self(), "sleeping takes no processor time, so the wait would not end"


def simulated_engine(
    allocator: str,
    max_model_len: int,
    budget: Budget,
    *,
    placement: str = "buddy",
    cost: StepCost | None = None,
    enable_prefix_caching: bool | None = None,
) -> tuple[Engine, VirtualClock]:
    """An engine without a model, and its clock. placement: of contiguous runs.
    enable_prefix_caching: None: with pages only.

    Raises ConfigurationError where the budget is too small.
    """
    config = KVCacheConfig(
        (KVGroup((0,), KVKind.FULL, _BYTES_PER_BLOCK),),
        budget.num_blocks,
        budget.block_size,
        allocator == PAGED if enable_prefix_caching is None else enable_prefix_caching,
        secret=b"bench",
    )
    scheduler = Scheduler(
        SchedulerConfig(budget.max_num_seqs, budget.max_num_batched_tokens),
        find_allocator(allocator, placement)(config, max_model_len),
        POLICIES.make("fcfs"),
    )
    clock = VirtualClock()
    runner = counting_runner(cost or StepCost(), clock, budget.block_size)
    return Engine(scheduler, runner, ModelLimits(VOCAB_SIZE, max_model_len), clock=clock), clock


def simulate(
    allocator: str, load: MemoryLoad, budget: Budget, placement: str, cost: StepCost
) -> Carried:
    """Carry the load on a virtual clock.

    Raises ConfigurationError where the budget is too small, RequestNeverFitsError where it is for
    one of the requests.
    """
    engine, clock = simulated_engine(
        allocator, load.max_model_len, budget, placement=placement, cost=cost
    )
    return carry(engine, make_memory_requests(load, VOCAB_SIZE), draw_arrivals(load), clock)


def real_engine(
    allocator: str,
    max_model_len: int,
    budget: Budget,
    options: Mapping[str, Any],
    placement: str = "buddy",
) -> Engine:
    """An engine with a model. options: more for it, by EngineOptions' names. placement: of
    contiguous runs."""
    return build_engine(
        {
            "max_model_len": max_model_len,
            "num_blocks": budget.num_blocks,
            "block_size": budget.block_size,
            "max_num_seqs": budget.max_num_seqs,
            "max_num_batched_tokens": budget.max_num_batched_tokens,
            "speculation": "off",  # as in the simulation
            **options,
        },
        kv_allocator=None if allocator == PAGED else find_allocator(allocator, placement),
    )


def run_engine(
    allocator: str, load: MemoryLoad, budget: Budget, options: Mapping[str, Any]
) -> Carried:
    """Carry the load on a model, in wall time; otherwise as `simulate`."""
    engine = real_engine(allocator, load.max_model_len, budget, options)
    requests = make_memory_requests(load, engine.limits.vocab_size)
    return carry(engine, requests, draw_arrivals(load), WallClock())


@dataclass(slots=True)
class _Progress:
    """How far a run is. ended_s: request -> when it ended."""

    arrivals_s: Sequence[float]
    num_arrived: int = 0
    ended_s: dict[int, float] = field(default_factory=dict)


def carry(
    engine: Engine, requests: Sequence[BenchRequest], arrivals_s: Sequence[float], clock: Clock
) -> Carried:
    """Hand over each request when it arrives, and step until all have ended."""
    progress = _Progress(arrivals_s)
    meter = MemoryMeter(len(requests), _LEDGER_INTERVAL)
    while progress.num_arrived < len(requests) or engine.has_work():
        started_s = clock()
        if not engine.has_work():
            clock.wait_until(arrivals_s[progress.num_arrived])
            num_to_come = len(requests) - progress.num_arrived
            meter.observe(engine.scheduler, (), clock() - started_s, num_to_come)
            started_s = clock()
        _take_arrivals(engine, requests, progress, clock)
        outputs = engine.step()
        now_s = clock()
        for output in outputs:
            if output.error is not None:
                raise StepFailedError(f"request {output.request_id} failed: {output.error}")
            if output.finish_reason is not None:
                progress.ended_s[int(output.request_id)] = now_s
        num_to_come = len(requests) - progress.num_arrived
        meter.observe(engine.scheduler, outputs, now_s - started_s, num_to_come)
    stats = engine.stats()
    per_token = [
        (progress.ended_s[request.index] - arrivals_s[request.index]) / request.output_len
        for request in requests
    ]
    return Carried(
        use=meter.use(),
        seconds_per_token=sum(per_token) / len(per_token),
        p99_seconds_per_token=float(np.percentile(per_token, 99)),
        duration_s=max(progress.ended_s.values()) - arrivals_s[0],
        num_steps=stats.num_steps,
        num_preemptions=stats.num_preemptions,
        num_recomputed_tokens=stats.num_recomputed_tokens,
    )


def _take_arrivals(
    engine: Engine, requests: Sequence[BenchRequest], progress: _Progress, clock: Clock
) -> None:
    now_s, arrivals_s = clock(), progress.arrivals_s
    while progress.num_arrived < len(requests) and arrivals_s[progress.num_arrived] <= now_s:
        request = requests[progress.num_arrived]
        params = DecodingParams(request.output_len, temperature=0.0)
        engine.add(Request(str(request.index), request.prompt_token_ids, params))
        progress.num_arrived += 1
