"""Claims about crowds: useful memory, requests at once, int8 KV, latency at equal load.

All on the virtual clock of `bench.memory`, with the load, the slots and the step costs that are
described there, after Kwon et al. (SOSP 2023). Only the size of an int8 page is asked of an engine.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from benchmarks.claims.chart import BLUE, GREY, ORANGE, RED, Axis, Line, Panel, draw_chart
from benchmarks.claims.claim import COMMAND, FOLKLORE, Claim, Picture, Setting, StudyResult
from benchmarks.memory.load import Budget, MemoryLoad
from benchmarks.memory.results import PUBLISHED_RUNNING
from benchmarks.memory.step_cost import StepCost
from benchmarks.memory.study import Carried, simulate
from quire.assembly.build import build_engine
from quire.bench.baselines.contiguous import PAGED

SOSP = "Kwon et al., PagedAttention, SOSP 2023"
PUBLISHED_USEFUL = 0.963  # figure 2 there
MORE_REQUESTS = 1.3
LESS_LATENCY = 0.6
TWICE = 1.8  # about
# A baseline keeps up with a load if it takes at most so much longer for all of it than pages.
KEEPS_UP = 1.05
CROWDED_RATE = 8.0
COST = StepCost()

# (allocator, placement): the kinder placement of the two, and that of the paper.
MAX = ("contiguous_max", "first_fit")
POW2 = ("contiguous_pow2", "first_fit")
ORACLE = ("contiguous_oracle", "first_fit")
PAPER_ORACLE = ("contiguous_oracle", "buddy")
PAGES = (PAGED, "buddy")
NAMES = {
    MAX: "reserves the longest length",
    POW2: "reserves a power of two",
    ORACLE: "reserves the true length",
    PAGES: "pages",
}
_COLOURS = {MAX: RED, POW2: ORANGE, ORACLE: GREY, PAGES: BLUE}

Contender = tuple[str, str]


def crowd_load(setting: Setting, rate: float, num_prompts: int) -> tuple[MemoryLoad, Budget]:
    """The published lengths and slots; with --quick a small load of the same kind."""
    load = MemoryLoad(num_prompts=num_prompts, requests_per_s=rate)
    if not setting.is_quick:
        return load, Budget()
    small = replace(load, num_prompts=30, input_mean=20, output_mean=20, max_model_len=128)
    return replace(small, requests_per_s=10 * rate), Budget(768, 8, 64, 256)


def study_memory(setting: Setting) -> StudyResult:
    """Useful memory and requests at once, beside contiguous reservations and with int8 KV."""
    load, budget = crowd_load(setting, 2.0, 600)
    found = {
        contender: simulate(contender[0], load, budget, contender[1], COST)
        for contender in (MAX, PAPER_ORACLE, ORACLE, PAGES)
    }
    return StudyResult(
        "Useful memory and requests at once",
        (
            _useful(found),
            _published_requests(found),
            _more_requests(found),
            _int8_requests(setting),
        ),
        (
            f"The load is {load.num_prompts} requests at {load.requests_per_s:g}/s, with prompts"
            f" of {load.input_mean} and outputs of {load.output_mean} tokens on average, over"
            f" {budget.num_slots:,} KV slots. It runs on a virtual clock whose steps take the time"
            " of OPT-13B on an A100 (`python -m benchmarks.memory` describes it). Averages are"
            " over the time in which requests wait. In comparisons with the paper, contiguous"
            " runs are placed by the buddy system; everywhere else by first fit, which wastes"
            " less.",
            "The int8 line compares equal bytes: an engine with the embedded model says how many"
            f" bytes a page takes in either format. Its requests come at {CROWDED_RATE:g}/s, so"
            " that they wait for memory in both formats. A step reads fewer bytes of context by"
            f" the same factor. The line holds from {TWICE} times on.",
        ),
    )


def _useful(found: Mapping[Contender, Carried]) -> Claim:
    ours, theirs = found[PAGES].use, found[PAPER_ORACLE].use
    return Claim(
        f"{PUBLISHED_USEFUL:.1%} of the KV memory is useful (20.4 to 38.2% without paging)",
        f"{SOSP}, figure 2",
        f"{ours.useful_share:.1%} of what is held ({ours.shares['useful']:.1%} of all slots; most"
        " others are cached or free)",
        f"{theirs.useful_share:.1%} ({NAMES[ORACLE]})",
        ours.useful_share / theirs.useful_share,
        ours.useful_share >= PUBLISHED_USEFUL,
        f"{COMMAND} memory; python -m benchmarks.memory",
    )


def _published_requests(found: Mapping[Contender, Carried]) -> Claim:
    ours, oracle, most = (found[name].use.mean_running for name in (PAGES, PAPER_ORACLE, MAX))
    published = PUBLISHED_RUNNING["sharegpt"]
    to_oracle = published[PAGED] / published["contiguous_oracle"]
    to_max = published[PAGED] / published["contiguous_max"]
    return Claim(
        f"{to_oracle:.1f} times the requests at once of reservations of the true length,"
        f" {to_max:.1f} times those of the longest",
        f"{SOSP}, section 6.2, figure 13a",
        f"{ours:.1f} at once",
        f"{oracle:.1f} (true length), {most:.1f} (longest: {ours / most:.1f}x)",
        ours / oracle,
        ours / oracle >= to_oracle and ours / most >= to_max,
        f"{COMMAND} memory; python -m benchmarks.memory",
    )


def _more_requests(found: Mapping[Contender, Carried]) -> Claim:
    ours, theirs = found[PAGES].use.mean_running, found[ORACLE].use.mean_running
    return Claim(
        "At least 30% more requests at once at equal memory",
        FOLKLORE,
        f"{ours:.1f} at once",
        f"{theirs:.1f} ({NAMES[ORACLE]}, by first fit: the best contiguous memory here)",
        ours / theirs,
        ours / theirs >= MORE_REQUESTS,
        f"{COMMAND} memory",
    )


def _int8_requests(setting: Setting) -> Claim:
    load, budget = crowd_load(setting, CROWDED_RATE, 600)
    wide, narrow = (_page_bytes(setting, name) for name in ("auto", "int8"))
    more = wide / narrow
    compact = replace(budget, num_slots=int(budget.num_slots * more))
    cost = replace(COST, context_token_s=COST.context_token_s / more)
    ours = simulate(*_paged(load, compact, cost)).use.mean_running
    theirs = simulate(*_paged(load, budget, COST)).use.mean_running
    return Claim(
        "8-bit K and V: about twice the room, so more requests at once",
        "vLLM's documentation, Quantized KV Cache (0.11), Performance Impact",
        f"{ours:.1f} at once in int8 ({narrow / wide:.3f}x of the bytes)",
        f"{theirs:.1f} (the same pages in bfloat16)",
        ours / theirs,
        ours / theirs >= TWICE,
        f"{COMMAND} memory",
    )


def _paged(
    load: MemoryLoad, budget: Budget, cost: StepCost
) -> tuple[str, MemoryLoad, Budget, str, StepCost]:
    return PAGED, load, budget, PAGES[1], cost


def _page_bytes(setting: Setting, kv_cache_dtype: str) -> int:
    """The bytes of a page of the model with bfloat16 weights."""
    options = {"model": setting.model, "dtype": "bfloat16", "kv_cache_dtype": kv_cache_dtype}
    engine = build_engine({**options, "num_blocks": 64, "max_model_len": 256})
    return engine.scheduler.memory.config.groups[0].bytes_per_block


# ---- latency --------------------------------------------------------------------------------

RATES = (0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0)


def study_latency(setting: Setting) -> StudyResult:
    """The 99th percentile of latency over the load, for each way to manage memory."""
    rates = (1.0, 2.0) if setting.is_quick else RATES
    found: dict[Contender, list[Carried]] = {contender: [] for contender in NAMES}
    for rate in rates:
        load, budget = crowd_load(setting, rate, 300)
        for contender in NAMES:
            found[contender].append(simulate(contender[0], load, budget, contender[1], COST))
    claim, notes = _less_latency(rates, found)
    notes = (
        "Latency is what the paper's figure 12 shows: the time from a request's arrival to its"
        " end, divided by its output's length, in seconds a token. Here it is the 99th percentile"
        " over 300 requests. The load and the clock are those of the memory lines.",
        *notes,
    )
    return StudyResult("Latency at equal load", (claim,), notes, (_latency_picture(rates, found),))


def _less_latency(
    rates: Sequence[float], found: Mapping[Contender, Sequence[Carried]]
) -> tuple[Claim, tuple[str, ...]]:
    at = {contender: _full_load(found[contender], found[PAGES]) for contender in NAMES}
    lines = {
        contender: (found[PAGES][index].p99_seconds_per_token, rates[index])
        for contender, index in at.items()
    }
    theirs = {name: found[name][index].p99_seconds_per_token for name, index in at.items()}
    ours, rate = lines[ORACLE]
    ratio = ours / theirs[ORACLE]
    others = "; ".join(
        f"{NAMES[name]}: {lines[name][1]:g}/s, {lines[name][0] * 1e3:.0f} ms instead of"
        f" {theirs[name] * 1e3:.0f} ms ({lines[name][0] / theirs[name] - 1:+.0%})"
        for name in (MAX, POW2, ORACLE)
    )
    claim = Claim(
        "p99 latency 40% lower than with contiguous memory at equal load",
        FOLKLORE,
        f"{ours * 1e3:.0f} ms a token at {rate:g} requests/s",
        f"{theirs[ORACLE] * 1e3:.0f} ms ({NAMES[ORACLE]}, by first fit)",
        ratio,
        ratio <= LESS_LATENCY,
        f"{COMMAND} latency",
    )
    return claim, (
        "Each baseline is compared at the highest of the tried loads with which it keeps up: all"
        f" requests are done at most {KEEPS_UP - 1:.0%} later than with pages. The figures are:"
        f" {others}. At lower loads no request waits for memory, and all are equal. At higher"
        " loads the baseline's queue grows without bound, and so does its latency.",
    )


def _full_load(found: Sequence[Carried], paged: Sequence[Carried]) -> int:
    """Index of the highest rate with which a baseline keeps up, and the lowest if with none."""
    kept = [
        index
        for index, (theirs, ours) in enumerate(zip(found, paged, strict=True))
        if theirs.duration_s <= KEEPS_UP * ours.duration_s
    ]
    return max(kept, default=0)


def _latency_picture(
    rates: Sequence[float], found: Mapping[Contender, Sequence[Carried]]
) -> Picture:
    lines = [
        Line(
            NAMES[contender].replace("reserves ", "reserves\n"),
            [
                (rate, one.p99_seconds_per_token * 1e3)
                for rate, one in zip(rates, outcomes, strict=True)
            ],
            _COLOURS[contender],
        )
        for contender, outcomes in found.items()
    ]
    panel = Panel(
        Axis("load, requests per second", low=math.floor(rates[0] * 4 - 1) / 4, ticks=tuple(rates)),
        Axis("p99 latency, ms per output token", is_log=True),
        lines,
    )
    title = "p99 latency by load, at equal KV memory"
    svg = draw_chart(title, "virtual clock, OPT-13B on an A100; logarithmic scale", [panel])
    caption = "99th percentile of latency by load, for pages and three contiguous reservations"
    return Picture("latency", caption, svg)
