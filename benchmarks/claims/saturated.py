"""Claims about throughput and memory use while more requests wait than memory has room for.

Pages beside continuous and static batches over reserved memory, with equal KV slots: on the virtual
clock of `bench.memory`, and on a model by the processor time of one computing thread, which other
processes do not disturb.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from benchmarks.claims.claim import COMMAND, FOLKLORE, Claim, Setting, StudyResult
from benchmarks.claims.crowds import (
    COST,
    MAX,
    NAMES,
    ORACLE,
    PAGES,
    SOSP,
    Contender,
    crowd_load,
)
from benchmarks.memory.load import SHAPES, Budget, MemoryLoad, make_memory_requests
from benchmarks.memory.meter import HELD_PARTS, WARM_UP_SHARE, MemoryMeter, MemoryUse
from benchmarks.memory.study import (
    Clock,
    ProcessorClock,
    real_engine,
    simulate,
    simulated_engine,
)
from quire.bench.baselines.contiguous import PAGED
from quire.bench.workload import BenchRequest
from quire.core.request import Request
from quire.core.sampling_params import DecodingParams
from quire.engine.engine import Engine
from quire.errors import StepFailedError

CONTINUOUS = f"{SOSP}, section 6.2: 2.7 to 8 times Orca (Max), 1.7 to 2.7 times Orca (Oracle)"
STATIC = (
    f"{SOSP}, section 6.2: up to 22 times FasterTransformer; Daniel et al., How continuous batching"
    " enables 23x throughput, Anyscale 2023"
)
TIMES_CONTINUOUS = 3.0
TIMES_STATIC = 6.0
LEAST_USE, MOST_USE = 0.85, 0.95
NUM_SIMULATED = 300
NUM_REAL = 120
TURN_S = 0.1
_LEDGER_INTERVAL = 5  # steps from one look at all slots to the next
LIGHTER_RATES = (1.0, 1.5, 2.0)
SHORT = SHAPES["alpaca"]

MakeEngine = Callable[[Contender], tuple[Engine, Clock]]


@dataclass(frozen=True, slots=True)
class Outcomes:
    """The results of one load on one clock. place: the clock, and whose steps it times.

    continuous: by contender, over the time in which requests wait. static: by contender that
    reserves. widths: of its batches, on average.
    """

    place: str
    continuous: Mapping[Contender, MemoryUse]
    static: Mapping[Contender, MemoryUse]
    widths: Mapping[Contender, float]


def study_throughput(setting: Setting) -> StudyResult:
    """Throughput and memory use beside reservations and static batches, on both clocks."""
    load, budget = crowd_load(setting, math.inf, NUM_SIMULATED)
    real_load = load if setting.is_quick else replace(load, num_prompts=NUM_REAL)

    def simulated(contender: Contender) -> tuple[Engine, Clock]:
        allocator, placement = contender
        longest = load.max_model_len
        return simulated_engine(allocator, longest, budget, placement=placement, cost=COST)

    options: dict[str, Any] = {"num_threads": 1, "speculation": "off"}
    if setting.model is not None:
        options["model"] = setting.model

    def real(contender: Contender) -> tuple[Engine, Clock]:
        allocator, placement = contender
        engine = real_engine(allocator, load.max_model_len, budget, options, placement)
        return engine, ProcessorClock()

    virtual = _measure("virtual clock", simulated, load, budget, math.inf)
    here = _measure("this processor", real, real_load, budget, TURN_S)
    claims = (
        *(_faster_than_reserved(outcomes) for outcomes in (virtual, here)),
        *(_faster_than_static(outcomes) for outcomes in (virtual, here)),
        _memory_in_use(setting, virtual, here, _by_load(load, budget)),
    )
    notes = _notes(setting, load, real_load, budget)
    return StudyResult("Throughput under saturation", claims, notes)


def _measure(
    place: str, make: MakeEngine, load: MemoryLoad, budget: Budget, turn_s: float
) -> Outcomes:
    """turn_s: see `take_turns`."""
    continuous: dict[Contender, Run] = {}
    static: dict[Contender, Run] = {}
    widths: dict[Contender, float] = {}
    for contender in (PAGES, MAX, ORACLE):
        engine, clock = make(contender)
        requests = make_memory_requests(load, engine.limits.vocab_size)
        continuous[contender] = Run(engine, clock, [requests], is_static=False)
        if contender != PAGES:
            longest = load.max_model_len if contender == MAX else None
            batches = list(static_batches(requests, budget, longest))
            widths[contender] = sum(map(len, batches)) / len(batches)
            static[contender] = Run(*make(contender), batches, is_static=True)
    take_turns([*continuous.values(), *static.values()], turn_s)
    return Outcomes(
        place,
        {contender: run.meter.use() for contender, run in continuous.items()},
        {contender: run.meter.use() for contender, run in static.items()},
        widths,
    )


class Run:
    """One engine and what it serves: each batch enters when the one before it has ended.

    Continuous batches are one batch of all requests. Measured are then the steps after a tenth has
    ended, and the run is done when no request waits; of static batches all steps are measured.
    """

    def __init__(
        self,
        engine: Engine,
        clock: Clock,
        batches: Sequence[Sequence[BenchRequest]],
        *,
        is_static: bool,
    ) -> None:
        self._engine = engine
        self._clock = clock
        self._batches = list(batches)
        self._is_static = is_static
        self._num_to_warm = 0.0 if is_static else WARM_UP_SHARE * len(batches[0])
        self._num_ended = 0
        # To the meter, requests are always to come for static batches, so it counts every step.
        self.meter = MemoryMeter(0 if is_static else len(batches[0]), _LEDGER_INTERVAL)

    @property
    def is_done(self) -> bool:
        """Whether nothing is left to measure."""
        if self._batches:
            return False
        if self._is_static:
            return not self._engine.has_work()
        return self._num_ended >= self._num_to_warm and not len(self._engine.scheduler.waiting)

    def step(self) -> float:
        """One step; returns how long it took."""
        if not self._engine.has_work():
            for request in self._batches.pop(0):
                params = DecodingParams(request.output_len, temperature=0.0)
                self._engine.add(Request(str(request.index), request.prompt_token_ids, params))
        started_s = self._clock()
        outputs = self._engine.step()
        seconds = self._clock() - started_s
        for output in outputs:
            if output.error is not None:
                raise StepFailedError(f"request {output.request_id} failed: {output.error}")
            self._num_ended += output.finish_reason is not None
        self.meter.observe(self._engine.scheduler, outputs, seconds, int(self._is_static))
        return seconds


class Steps(Protocol):
    """Something that is measured step by step."""

    @property
    def is_done(self) -> bool: ...

    def step(self) -> float:
        """One step; returns how long it took."""
        ...


def take_turns(runs: Sequence[Steps], turn_s: float) -> None:
    """Until the first run is done, or each of them if a turn may last for ever.

    turn_s: each run takes steps for so long, then the next; what a step takes beyond its turn is
    taken off the next ones. What slows the machine for a while then slows all runs alike. math.inf:
    one after the other, each to its end.
    """
    left_s = [0.0] * len(runs)
    while not runs[0].is_done:
        for index, run in enumerate(runs):
            left_s[index] += turn_s
            while left_s[index] > 0 and not run.is_done:
                left_s[index] -= run.step()


def static_batches(
    requests: Sequence[BenchRequest], budget: Budget, longest: int | None
) -> Iterator[list[BenchRequest]]:
    """In order of arrival, each as wide as memory has room for; without the last, which may be
    narrower than it could.

    longest: tokens reserved for each; None: its true length.
    """
    batch: list[BenchRequest] = []
    num_blocks = 0
    for request in requests:
        needed = -(-(longest or request.num_tokens) // budget.block_size)
        if num_blocks + needed > budget.num_blocks or len(batch) == budget.max_num_seqs:
            yield batch
            batch, num_blocks = [], 0
        batch.append(request)
        num_blocks += needed


# ---- what is made of it ---------------------------------------------------------------------


def _faster_than_reserved(outcomes: Outcomes) -> Claim:
    found = outcomes.continuous
    ours, most, oracle = (found[name].output_tokens_per_s for name in (PAGES, MAX, ORACLE))
    return Claim(
        f"At least {TIMES_CONTINUOUS:g} times the throughput of continuous batching over reserved"
        f" memory ({outcomes.place})",
        CONTINUOUS,
        f"{ours:,.0f} tokens/s, {found[PAGES].mean_running:.1f} at once",
        f"{most:,.0f} ({NAMES[MAX]}: {found[MAX].mean_running:.1f} at once), {oracle:,.0f}"
        f" ({NAMES[ORACLE]}: {found[ORACLE].mean_running:.1f} at once; {ours / oracle:.2f}x)",
        ours / most,
        ours / most >= TIMES_CONTINUOUS,
        f"{COMMAND} throughput",
    )


def _faster_than_static(outcomes: Outcomes) -> Claim:
    ours = outcomes.continuous[PAGES].output_tokens_per_s
    most, oracle = (outcomes.static[name].output_tokens_per_s for name in (MAX, ORACLE))
    widths = outcomes.widths
    return Claim(
        f"At least {TIMES_STATIC:g} times the throughput of static batches ({outcomes.place})",
        STATIC,
        f"{ours:,.0f} tokens/s",
        f"{most:,.0f} ({widths[MAX]:.0f} in a batch: {NAMES[MAX]}), {oracle:,.0f}"
        f" ({widths[ORACLE]:.0f} in a batch: {NAMES[ORACLE]}; {ours / oracle:.2f}x)",
        ours / most,
        ours / most >= TIMES_STATIC,
        f"{COMMAND} throughput",
    )


def _memory_in_use(
    setting: Setting, virtual: Outcomes, here: Outcomes, by_load: Mapping[str, MemoryUse]
) -> Claim:
    simulated, real = (outcomes.continuous[PAGES] for outcomes in (virtual, here))
    most, oracle = (virtual.continuous[name].shares["useful"] for name in (MAX, ORACLE))
    lighter = ", ".join(f"{use.shares['useful']:.1%} {name}" for name, use in by_load.items())
    return Claim(
        f"{LEAST_USE:.0%} to {MOST_USE:.0%} of the KV memory is in use while requests wait",
        FOLKLORE,
        f"OPT-13B, {virtual.place}: {_use(simulated)} ({lighter});"
        f" {_name(setting)}, {here.place}: {_use(real)}",
        f"{most:.1%} useful ({NAMES[MAX]}), {oracle:.1%} ({NAMES[ORACLE]}; both {virtual.place})",
        simulated.shares["useful"] / most,
        min(use.shares["useful"] for use in (simulated, real)) >= LEAST_USE,
        f"{COMMAND} throughput",
    )


def _name(setting: Setting) -> str:
    return setting.model or "the embedded model"


def _use(use: MemoryUse) -> str:
    held = sum(use.shares[part] for part in HELD_PARTS)
    return f"{use.shares['useful']:.1%} of all slots useful, {held:.1%} held"


def _short(load: MemoryLoad) -> MemoryLoad:
    """As many tokens in shorter requests, so that about as many steps are measured."""
    return replace(
        load,
        num_prompts=4 * load.num_prompts,
        input_mean=SHORT.input_mean,
        output_mean=SHORT.output_mean,
    )


def _by_load(load: MemoryLoad, budget: Budget) -> dict[str, MemoryUse]:
    """Memory use where it is lower, by load, on the virtual clock."""
    loads = {f"at {rate:g}/s": replace(load, requests_per_s=rate) for rate in LIGHTER_RATES}
    loads["of short requests"] = _short(load)
    return {name: simulate(PAGED, one, budget, PAGES[1], COST).use for name, one in loads.items()}


def _notes(
    setting: Setting, load: MemoryLoad, real_load: MemoryLoad, budget: Budget
) -> tuple[str, ...]:
    return (
        f"The lengths and the {budget.num_slots:,} KV slots are those of the memory lines. All"
        f" requests are there at once: {load.num_prompts} on the virtual clock of OPT-13B on an"
        f" A100, {real_load.num_prompts} on {_name(setting)} on this processor. Continuous batches"
        " are measured while requests wait, after a tenth has ended. Static batches are formed in"
        " order of arrival, as wide as reserved memory has room for, and run until their longest"
        " output is done. Their prompts are not padded and ended rows cost nothing, which favours"
        " them. All run on the same engine and kernels.",
        "The verdict compares with the reservation of the longest length, which systems without"
        " paging had to make: output lengths are not known in advance. The ratio to reservations"
        " of the true length is printed too, but decides nothing.",
        "On this processor, time is processor time of one computing thread. The engines take"
        f" turns of {TURN_S:g} s until pages are done, so that what slows the machine slows all."
        " On the virtual clock a large part of a step does not depend on the batch, the reading"
        " of the weights, so a batch five times as wide costs little more. A core computes much"
        " slower than it reads. There a wider batch soon takes longer in proportion to its rows,"
        " so that more room brings little throughput.",
        "How much of the memory is in use depends on the load. At low rates no request waits, and"
        f" there is memory to spare. With short requests (prompts of {SHORT.input_mean} and"
        f" outputs of {SHORT.output_mean} tokens on average, {_short(load).num_prompts} at once),"
        " partly filled last blocks are a larger share, and admission keeps more memory free for"
        " growth. The held slots include those that are reserved or not filled yet.",
    )
