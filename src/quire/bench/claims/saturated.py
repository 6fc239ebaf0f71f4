"""Claims about throughput and memory use while more requests wait than memory has room for.

Pages beside continuous and static batches over reserved memory, with equal KV slots: on the virtual
clock of `bench.memory`, and on a model by the processor time of one computing thread, which other
processes do not disturb.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from quire.bench.baselines.contiguous import PAGED
from quire.bench.claims.claim import COMMAND, FOLKLORE, Claim, Setting, StudyResult
from quire.bench.claims.crowds import (
    COST,
    MAX,
    NAMES,
    ORACLE,
    PAGES,
    SOSP,
    Contender,
    crowd_load,
)
from quire.bench.memory.load import SHAPES, Budget, MemoryLoad, make_memory_requests
from quire.bench.memory.meter import HELD_PARTS, MemoryUse
from quire.bench.memory.study import (
    Clock,
    ProcessorClock,
    carry,
    real_engine,
    simulate,
    simulated_engine,
)
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
NUM_REAL = 200
NUM_REAL_STATIC = 100
LIGHTER_RATES = (1.0, 1.5, 2.0)
SHORT = SHAPES["alpaca"]

MakeEngine = Callable[[Contender], tuple[Engine, Clock]]


@dataclass(frozen=True, slots=True)
class StaticOutcome:
    """Of batches that are formed once. mean_width: requests in a batch, over the batches."""

    tokens_per_s: float
    mean_width: float


@dataclass(frozen=True, slots=True)
class Outcomes:
    """What came of one load on one clock. place: the clock, and whose steps it times.

    continuous: by contender, over the time in which requests wait. static: by contender that
    reserves.
    """

    place: str
    continuous: Mapping[Contender, MemoryUse]
    static: Mapping[Contender, StaticOutcome]


def study_throughput(setting: Setting) -> StudyResult:
    """Throughput and memory use beside reservations and static batches, on both clocks."""
    load, budget = crowd_load(setting, math.inf, NUM_SIMULATED)
    real_load = load if setting.is_quick else replace(load, num_prompts=NUM_REAL)
    num_static = load.num_prompts if setting.is_quick else NUM_REAL_STATIC

    def simulated(contender: Contender) -> tuple[Engine, Clock]:
        allocator, placement = contender
        longest = load.max_model_len
        return simulated_engine(allocator, longest, budget, placement=placement, cost=COST)

    options: dict[str, Any] = {"num_threads": 1}
    if setting.model is not None:
        options["model"] = setting.model

    def real(contender: Contender) -> tuple[Engine, Clock]:
        allocator, placement = contender
        engine = real_engine(allocator, load.max_model_len, budget, options, placement)
        return engine, ProcessorClock()

    virtual = _measure("virtual clock", simulated, load, budget, load.num_prompts)
    here = _measure("this processor", real, real_load, budget, num_static)
    claims = (
        *(_faster_than_reserved(outcomes) for outcomes in (virtual, here)),
        *(_faster_than_static(outcomes) for outcomes in (virtual, here)),
        _memory_in_use(setting, virtual, here, _by_load(load, budget)),
    )
    notes = _notes(setting, load, real_load, budget, num_static)
    return StudyResult("Throughput under saturation", claims, notes)


def _measure(
    place: str, make: MakeEngine, load: MemoryLoad, budget: Budget, num_static: int
) -> Outcomes:
    """num_static: requests that static batches are measured with."""
    continuous: dict[Contender, MemoryUse] = {}
    static: dict[Contender, StaticOutcome] = {}
    for contender in (MAX, ORACLE, PAGES):
        engine, clock = make(contender)
        requests = make_memory_requests(load, engine.limits.vocab_size)
        continuous[contender] = carry(engine, requests, [0.0] * len(requests), clock).use
        if contender != PAGES:
            longest = load.max_model_len if contender == MAX else None
            batches = list(static_batches(requests[:num_static], budget, longest))
            static[contender] = serve_static(engine, batches, clock)
    return Outcomes(place, continuous, static)


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


def serve_static(
    engine: Engine, batches: Sequence[Sequence[BenchRequest]], clock: Clock
) -> StaticOutcome:
    """Each batch enters an empty engine, and the next one when its last request has ended."""
    seconds = 0.0
    for batch in batches:
        for request in batch:
            params = DecodingParams(request.output_len, temperature=0.0)
            engine.add(Request(str(request.index), request.prompt_token_ids, params))
        started_s = clock()
        while engine.has_work():
            for output in engine.step():
                if output.error is not None:
                    raise StepFailedError(f"request {output.request_id} failed: {output.error}")
        seconds += clock() - started_s
    num_tokens = sum(request.output_len for batch in batches for request in batch)
    return StaticOutcome(num_tokens / seconds, sum(map(len, batches)) / len(batches))


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
    most, oracle = outcomes.static[MAX], outcomes.static[ORACLE]
    return Claim(
        f"At least {TIMES_STATIC:g} times the throughput of static batches ({outcomes.place})",
        STATIC,
        f"{ours:,.0f} tokens/s",
        f"{most.tokens_per_s:,.0f} ({most.mean_width:.0f} in a batch: {NAMES[MAX]}),"
        f" {oracle.tokens_per_s:,.0f} ({oracle.mean_width:.0f} in a batch: {NAMES[ORACLE]};"
        f" {ours / oracle.tokens_per_s:.2f}x)",
        ours / most.tokens_per_s,
        ours / most.tokens_per_s >= TIMES_STATIC,
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
    setting: Setting, load: MemoryLoad, real_load: MemoryLoad, budget: Budget, num_static: int
) -> tuple[str, ...]:
    return (
        f"The memory lines' lengths and their {budget.num_slots:,} KV slots for all, with all"
        f" requests there at once: {load.num_prompts} on the virtual clock of OPT-13B on an A100,"
        f" {real_load.num_prompts} on {_name(setting)} on this processor."
        " Continuous batches are measured while requests wait, after a tenth has ended. Static"
        " batches are formed in order of arrival, as wide as reserved memory has room for, and run"
        " until their longest output is done; their rate is over all full batches (of"
        f" {num_static} requests on this processor), and prompts are not padded and rows that have"
        " ended cost nothing, which is kinder than usual. All run on the same engine and kernels.",
        "A verdict is by the reservation of the longest length, which systems without paging had to"
        " make: output lengths are not known in advance. The ratio beside reservations of the true"
        " length stands with them, and decides nothing.",
        "On this processor, time is processor time of one computing thread. A step of the virtual"
        " clock has a large part that does not depend on the batch, the reading of the weights: a"
        " batch five times as wide costs little more. A core computes so much slower than it reads"
        " that a wider batch soon takes as much longer as it has more rows, so that more room"
        " brings little throughput there.",
        "How much of the memory is in use depends on the load. At low rates no request waits, and"
        f" there is memory to spare. Of short requests (prompts of {SHORT.input_mean} and outputs"
        f" of {SHORT.output_mean} tokens on average, {_short(load).num_prompts} at once), partly"
        " filled last blocks are a larger share, and admission keeps more free for growth. Held are"
        " also the slots that are reserved or not filled yet.",
    )
