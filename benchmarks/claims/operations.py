"""Claims about single operations: memory under fragmentation, and look-ups.

Managers are driven as the scheduler does: `match` and `admit` when a sequence comes, `free` when it
goes. Times are processor time of this thread, so that other processes disturb little, of batches of
operations, without garbage collection; levels and managers take turns in each round.
"""

import gc
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from benchmarks.claims.chart import BLUE, GREEN, ORANGE, RED, Axis, Line, Panel, draw_chart
from benchmarks.claims.claim import COMMAND, FOLKLORE, Claim, Picture, Setting, StudyResult
from quire.bench.baselines.contiguous import PAGED, find_allocator
from quire.core.kv_groups import KVGroup, KVKind
from quire.core.memory.kv_cache_manager import KVCacheConfig, KVCacheManager
from quire.core.sampling_params import DecodingParams
from quire.core.sequence import Sequence as KVSequence

BLOCK_SIZE = 16
RUN_BLOCKS = 32  # of the sequences that come and go
NUM_LIVE_RUNS = 4  # the memory that is usable at the highest level has room for one more
MOST_DEVIATION = 0.05
LEVELS = (0.0, 0.25, 0.5, 0.75, 0.9, 0.99)
SEED = 4405
_GROUP = KVGroup((0,), KVKind.FULL, 4096)
_NEVER_ENDED = 0  # a step: the managers are asked outside of any

PAGES, ALL_PAGES = "pages", "pages, all in use"
FIRST_FIT, BUDDY = "contiguous, first fit", "contiguous, buddy"
MANAGERS = {
    PAGES: (PAGED, "buddy", BLUE),
    ALL_PAGES: (PAGED, "buddy", GREEN),
    FIRST_FIT: ("contiguous_oracle", "first_fit", RED),
    BUDDY: ("contiguous_oracle", "buddy", ORANGE),
}


@dataclass(frozen=True, slots=True)
class Sizes:
    """num_blocks: of the pool, half of them free. num_operations: in a batch; batches of first fit
    have a tenth. num_rounds: batches of each manager and level."""

    num_blocks: int = 32_768
    num_operations: int = 1_000
    num_rounds: int = 31


QUICK = Sizes(1_024, 30, 3)


def make_sequence(num_tokens: int) -> KVSequence:
    """A sequence that ends with num_tokens tokens. All but the last one belong to the prompt."""
    params = DecodingParams(max_tokens=1)
    return KVSequence("operations", [0] * (num_tokens - 1), params)


def make_memory(manager: str, num_blocks: int) -> KVCacheManager:
    """An empty one of MANAGERS, without a prefix cache, which only pages could have."""
    allocator, placement, _ = MANAGERS[manager]
    config = KVCacheConfig((_GROUP,), num_blocks, BLOCK_SIZE, enable_prefix_caching=False)
    return find_allocator(allocator, placement)(config, RUN_BLOCKS * BLOCK_SIZE)


def _admit(memory: KVCacheManager, sequence: KVSequence) -> None:
    memory.admit(sequence, memory.match(sequence), _NEVER_ENDED)


class Churn:
    """Sequences that come and go in a memory that is half held, and fragmented to a level.

    level: the share of the free blocks that lie in holes of one block, too short for a sequence
    that needs adjacent ones: Linux's unusable free space index.
    NUM_LIVE_RUNS sequences come and go in the rest; with ALL_PAGES as many as fill the free blocks
    wherever they lie, the oldest leaving first.
    """

    def __init__(self, manager: str, level: float, num_blocks: int) -> None:
        self._memory = memory = make_memory(manager, num_blocks)
        num_free = num_blocks // 2
        num_holes = min(int(level * num_free), num_free - (NUM_LIVE_RUNS + 1) * RUN_BLOCKS)
        holes = []
        for index in range(num_free):
            _admit(memory, make_sequence(BLOCK_SIZE))  # never freed: a wall
            if index < num_holes:
                holes.append(make_sequence(BLOCK_SIZE))
                _admit(memory, holes[-1])
        random.Random(SEED).shuffle(holes)
        for hole in holes:
            memory.free(hole)
        num_runs = num_free // RUN_BLOCKS - 1 if manager == ALL_PAGES else NUM_LIVE_RUNS
        self._runs = [make_sequence(RUN_BLOCKS * BLOCK_SIZE) for _ in range(num_runs)]
        for run in self._runs:
            _admit(memory, run)
        self._spare = make_sequence(RUN_BLOCKS * BLOCK_SIZE)
        self._next = 0

    def operate(self, count: int) -> None:
        """So often a sequence goes, and another one comes."""
        memory, runs, spare, at = self._memory, self._runs, self._spare, self._next
        for _ in range(count):
            at = (at + 1) % len(runs)
            memory.free(runs[at])
            memory.admit(spare, memory.match(spare), _NEVER_ENDED)
            runs[at], spare = spare, runs[at]
        self._spare, self._next = spare, at


def cpu_ns(operate: Callable[[int], object], count: int) -> float:
    """Processor time of one of `count` operations, on average."""
    started = time.thread_time_ns()
    operate(count)
    return (time.thread_time_ns() - started) / count


@contextmanager
def no_collection() -> Iterator[None]:
    """Without garbage collection within; what is there is collected before."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


# ---- fragmentation --------------------------------------------------------------------------


def study_fragmentation(setting: Setting) -> StudyResult:
    """The time of a memory operation over the level of fragmentation."""
    sizes = QUICK if setting.is_quick else Sizes()
    batches = {name: _batches(name, sizes) for name in MANAGERS}
    medians = {
        name: {level: statistics.median(times) for level, times in by_level.items()}
        for name, by_level in batches.items()
    }
    over_levels = {name: _deviation(list(found.values())) for name, found in medians.items()}
    notes = (
        f"The memory has {sizes.num_blocks:,} blocks, half of them held. In an operation, a"
        f" sequence of {RUN_BLOCKS} blocks leaves and another enters, by the calls that the"
        " scheduler makes. A level of 99% means that 99% of the free blocks lie in holes of one"
        " block: it is Linux's unusable free space index for these sequences. Figures are medians"
        f" of {sizes.num_rounds} batches of {sizes.num_operations:,} operations (first fit: a"
        " tenth) by processor time, the levels in turns.",
        "First fit steps over every hole that is too short. The buddy system finds its place at"
        " once, but rounds runs up. Neither can use the short holes: where no hole is long"
        " enough, they wait or move other sequences, which these times leave out.",
        f"In each memory {NUM_LIVE_RUNS} sequences come and go, as many as the adjacent blocks"
        " take at the highest level. The second line has as many as fill all free blocks, which"
        " only pages can use. They touch all of the pool's arrays, and where ids are out of order"
        " the processor's caches miss more often. These misses, and no search, are the remaining"
        " cost of fragmentation.",
    )
    claims = (
        _steady(PAGES, "", batches, medians, over_levels),
        _steady(ALL_PAGES, ", with all free memory in use", batches, medians, over_levels),
    )
    return StudyResult("Memory operations under fragmentation", claims, notes, (_picture(medians),))


def _steady(
    name: str,
    condition: str,
    batches: Mapping[str, Mapping[float, Sequence[float]]],
    medians: Mapping[str, Mapping[float, float]],
    deviations: Mapping[str, float],
) -> Claim:
    slowest = {key: max(found.values()) / min(found.values()) for key, found in medians.items()}
    ours, first_fit, buddy = (deviations[key] for key in (name, FIRST_FIT, BUDDY))
    mean_us = statistics.mean(medians[name].values()) / 1e3
    within = [_deviation(times) for times in batches[name].values()]
    return Claim(
        "Standard deviation of the time of a memory operation within 5%, whatever the"
        f" fragmentation{condition}",
        FOLKLORE,
        f"{ours:.1%} over levels of 0 to 99% (mean {mean_us:.1f} us, slowest level"
        f" {slowest[name]:.2f}x the fastest); batches of one level deviate by"
        f" {statistics.median(within):.1%} (worst level {max(within):.1%})",
        f"{first_fit:.0%} (first fit, {slowest[FIRST_FIT]:,.0f}x), {buddy:.1%} (buddy,"
        f" {slowest[BUDDY]:.2f}x, in the adjacent part alone)",
        ours / first_fit,
        ours <= MOST_DEVIATION,
        f"{COMMAND} fragmentation",
    )


def _batches(manager: str, sizes: Sizes) -> dict[float, list[float]]:
    """Level -> nanoseconds of an operation, of each batch; levels in turns, forwards and back."""
    churns = {level: Churn(manager, level, sizes.num_blocks) for level in LEVELS}
    count = max(1, sizes.num_operations // 10) if manager == FIRST_FIT else sizes.num_operations
    found: dict[float, list[float]] = {level: [] for level in LEVELS}
    with no_collection():
        for churn in churns.values():
            churn.operate(count)
        for index in range(sizes.num_rounds):
            for level in LEVELS if index % 2 == 0 else LEVELS[::-1]:
                found[level].append(cpu_ns(churns[level].operate, count))
    return found


def _deviation(values: Sequence[float]) -> float:
    """Standard deviation by mean."""
    return statistics.pstdev(values) / statistics.mean(values)


def _picture(medians: Mapping[str, Mapping[float, float]]) -> Picture:
    lines = [
        Line(
            name,
            [(level * 100, time_ns / 1e3) for level, time_ns in found.items()],
            MANAGERS[name][2],
        )
        for name, found in medians.items()
    ]
    panel = Panel(
        Axis("free memory in holes that are too short, %", ticks=(0, 25, 50, 75, 90, 99)),
        Axis("processor time of an operation, µs", is_log=True, low=6.0),
        lines,
    )
    title = "The time of a memory operation by fragmentation"
    subtitle = "a sequence of 512 tokens goes and one comes; logarithmic scale"
    caption = "processor time of a memory operation over the level of fragmentation"
    return Picture("fragmentation", caption, draw_chart(title, subtitle, [panel]))


# ---- look-ups -------------------------------------------------------------------------------

CONTEXTS = (512, 2_048, 8_192, 32_768, 131_072)
NUM_LOOKUPS = 4_096
MOST_LOOKUP_NS = 1_000.0


def study_lookups(setting: Setting) -> StudyResult:
    """The time to find a token's slot through a block table, beside adding to a base address."""
    num_rounds = 3 if setting.is_quick else 41
    found = _lookup_times(CONTEXTS[:2] if setting.is_quick else CONTEXTS, num_rounds)
    ours = {context: times[0] for context, times in found.items()}
    base = statistics.mean(times[1] for times in found.values())
    shown = ", ".join(f"{time_ns:.0f} ns at {context:,}" for context, time_ns in ours.items())
    claim = Claim(
        "A token is found through the block table in nanoseconds, at any context",
        f"{FOLKLORE} (the block table: Kwon et al., SOSP 2023, section 4.2)",
        shown,
        f"{base:.0f} ns (contiguous memory: base + position)",
        statistics.mean(ours.values()) / base,
        max(ours.values()) < MOST_LOOKUP_NS,
        f"{COMMAND} lookups",
    )
    notes = (
        "Random positions are looked up in tables of blocks that lie anywhere. Figures are"
        f" medians of {num_rounds} batches of {NUM_LOOKUPS:,} look-ups by processor time, one by"
        " one from Python, whose loop takes most of it. The kernels do the same arithmetic in C++"
        " or on the GPU. With longer contexts the processor's nearest cache misses the table more"
        " often. The line holds if every figure is below a microsecond.",
    )
    return StudyResult("Look-ups", (claim,), notes)


def _lookup_times(contexts: Sequence[int], num_rounds: int) -> dict[int, tuple[float, float]]:
    """Context -> nanoseconds of a look-up: (through a table, from a base address)."""
    draw = random.Random(SEED)
    memory = make_memory(PAGES, sum(contexts) // BLOCK_SIZE)
    taken, _ = memory.pool.take(memory.pool.num_free)
    draw.shuffle(taken)
    memory.pool.release_all(taken)
    looks: dict[int, tuple[Callable[[int], object], Callable[[int], object]]] = {}
    for context in contexts:
        sequence = make_sequence(context)
        _admit(memory, sequence)
        positions = [draw.randrange(context) for _ in range(NUM_LOOKUPS)]
        looks[context] = _lookups(sequence.block_tables[0], positions)
    times: dict[int, tuple[list[float], list[float]]] = {context: ([], []) for context in contexts}
    with no_collection():
        for index in range(num_rounds):
            for context in contexts if index % 2 == 0 else contexts[::-1]:
                for look, found in zip(looks[context], times[context], strict=True):
                    found.append(cpu_ns(look, NUM_LOOKUPS))
    return {
        context: (statistics.median(paged), statistics.median(base))
        for context, (paged, base) in times.items()
    }


def _lookups(
    table: Sequence[int], positions: Sequence[int]
) -> tuple[Callable[[int], object], Callable[[int], object]]:
    size, start = BLOCK_SIZE, table[0]

    def paged(_: int) -> list[int]:
        return [table[position // size] * size + position % size for position in positions]

    def contiguous(_: int) -> list[int]:
        return [start * size + position for position in positions]

    return paged, contiguous
