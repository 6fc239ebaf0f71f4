"""The claim that batches follow the load, over a rise and fall of arrivals.

On the virtual clock of `bench.memory`, beside batches that are formed once: the requests that wait,
up to a width, run until the last of them has ended, and only then come the next. Both on the same
engine and pages.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.claims.chart import BLUE, GREEN, RED, Axis, Line, Panel, draw_chart
from benchmarks.claims.claim import COMMAND, Claim, Picture, Setting, StudyResult
from benchmarks.memory.load import Budget, MemoryLoad, make_memory_requests
from benchmarks.memory.step_cost import VOCAB_SIZE
from benchmarks.memory.study import simulated_engine
from quire.bench.baselines.contiguous import PAGED
from quire.bench.workload import BenchRequest
from quire.core.request import Request
from quire.core.sampling_params import DecodingParams
from quire.errors import StepFailedError

ORCA = "Yu et al., Orca, OSDI 2022, section 3"
RATES = (0.2, 0.6, 1.0, 1.4, 1.0, 0.6, 0.2)
PHASE_S = 180.0
STATIC_WIDTH = 16
SEED = 7331
# A phase's batches settle while its first requests end.
_SETTLED_SHARE = 1 / 3
_POINT_S = 15.0  # of the picture


@dataclass(frozen=True, slots=True)
class LoadTrace:
    """Poisson arrivals at one rate after the other, each for phase_s seconds."""

    rates: tuple[float, ...] = RATES
    phase_s: float = PHASE_S

    def arrivals_s(self) -> list[float]:
        """Ascending."""
        generator = np.random.default_rng(SEED)
        found: list[float] = []
        for phase, rate in enumerate(self.rates):
            count = generator.poisson(rate * self.phase_s)
            found += sorted(generator.uniform(0, self.phase_s, count) + phase * self.phase_s)
        return [float(at_s) for at_s in found]


@dataclass(frozen=True, slots=True)
class Served:
    """sizes: (seconds, requests in the batch) after each step and at each idle moment.
    per_token_s: each request's time from arrival to end, by its output's length."""

    sizes: list[tuple[float, int]]
    per_token_s: list[float]

    def mean_size(self, start_s: float, stop_s: float) -> float:
        """Over time."""
        total = 0.0
        for (at_s, size), (next_s, _) in zip(self.sizes, self.sizes[1:], strict=False):
            total += size * max(0.0, min(stop_s, next_s) - max(start_s, at_s))
        return total / (stop_s - start_s)


def study_batches(setting: Setting) -> StudyResult:
    """Batch sizes and latencies under a load that rises and falls."""
    trace = LoadTrace((4.0, 12.0, 4.0), 6.0) if setting.is_quick else LoadTrace()
    arrivals_s = trace.arrivals_s()
    load, budget = MemoryLoad(num_prompts=len(arrivals_s)), Budget()
    if setting.is_quick:
        load = replace(load, input_mean=10, output_mean=10, max_model_len=64)
    requests = make_memory_requests(load, VOCAB_SIZE)
    ours = _serve(requests, arrivals_s, load, budget, None)
    static = _serve(requests, arrivals_s, load, budget, STATIC_WIDTH)
    claim = _claim(trace, ours, static)
    notes = (
        f"{len(requests)} requests of the memory lines' lengths come on their virtual clock, at"
        f" {', '.join(f'{rate:g}' for rate in trace.rates)} a second, {trace.phase_s:g} s each."
        f" The baseline forms a batch of at most {STATIC_WIDTH} waiting requests, and the next one"
        " when its last request has ended; finished rows cost it nothing. In the middle phase more"
        " requests come than it can carry, and its queue and latency grow. The line holds if the"
        " mean batch of a phase (without its first third) grows whenever the load grows, and"
        " shrinks whenever it shrinks.",
    )
    return StudyResult("Batches follow the load", (claim,), notes, (_picture(trace, ours, static),))


def _serve(
    requests: Sequence[BenchRequest],
    arrivals_s: Sequence[float],
    load: MemoryLoad,
    budget: Budget,
    width: int | None,
) -> Served:
    """Until all have ended. width: of batches that are formed once; None: requests join at once."""
    engine, clock = simulated_engine(PAGED, load.max_model_len, budget)
    num_added = num_arrived = 0
    sizes: list[tuple[float, int]] = [(0.0, 0)]
    ended_s: dict[int, float] = {}
    while len(ended_s) < len(requests):
        if not engine.has_work() and num_added == num_arrived:
            clock.wait_until(arrivals_s[num_arrived])
        while num_arrived < len(requests) and arrivals_s[num_arrived] <= clock():
            num_arrived += 1
        stop = num_arrived
        if width is not None:
            stop = num_added if engine.has_work() else min(num_arrived, num_added + width)
        for request in requests[num_added:stop]:
            params = DecodingParams(request.output_len, temperature=0.0)
            engine.add(Request(str(request.index), request.prompt_token_ids, params))
        num_added = stop
        outputs = engine.step()
        for output in outputs:
            if output.error is not None:
                raise StepFailedError(f"request {output.request_id} failed: {output.error}")
            if output.finish_reason is not None:
                ended_s[int(output.request_id)] = clock()
        sizes.append((clock(), len(engine.scheduler.running)))
    per_token_s = [
        (ended_s[request.index] - arrivals_s[request.index]) / request.output_len
        for request in requests
    ]
    return Served(sizes, per_token_s)


def _claim(trace: LoadTrace, ours: Served, static: Served) -> Claim:
    spans = [
        ((phase + _SETTLED_SHARE) * trace.phase_s, (phase + 1) * trace.phase_s)
        for phase in range(len(trace.rates))
    ]
    sizes = [ours.mean_size(*span) for span in spans]
    others = [static.mean_size(*span) for span in spans]
    follows = all(
        (after - before) * (later - earlier) > 0
        for before, after, earlier, later in zip(
            trace.rates, trace.rates[1:], sizes, sizes[1:], strict=False
        )
    )
    p99, static_p99 = (float(np.percentile(one.per_token_s, 99)) for one in (ours, static))
    mean, static_mean = (statistics.mean(one.per_token_s) for one in (ours, static))
    shown, other = (" ".join(f"{size:.1f}" for size in found) for found in (sizes, others))
    return Claim(
        "The batch follows the load: requests join and leave at every step, no batch is static",
        ORCA,
        f"mean batch by phase {shown}; {mean * 1e3:.0f} ms a token, p99 {p99 * 1e3:.0f}",
        f"{other}; {static_mean * 1e3:.0f} ms a token, p99 {static_p99 * 1e3:.0f} (batches formed"
        f" once, at most {STATIC_WIDTH})",
        p99 / static_p99,
        follows and p99 < static_p99,
        f"{COMMAND} batches",
    )


def _picture(trace: LoadTrace, ours: Served, static: Served) -> Picture:
    end_s = len(trace.rates) * trace.phase_s
    arrivals = [(phase * trace.phase_s, rate) for phase, rate in enumerate(trace.rates)]
    arrivals.append((end_s, trace.rates[-1]))
    minutes = Axis("time, minutes", low=0.0, high=end_s / 60)
    batches = Panel(
        minutes,
        Axis("requests in the batch"),
        [
            _sizes("quire", ours, end_s, BLUE),
            _sizes("batches\nformed once", static, end_s, RED),
        ],
    )
    load = Panel(
        minutes,
        Axis("requests per second"),
        [
            Line(
                "arrivals",
                [(at_s / 60, rate) for at_s, rate in arrivals],
                GREEN,
                is_step=True,
                has_marks=False,
            )
        ],
        height=90,
    )
    subtitle = f"virtual clock, OPT-13B on an A100; means over {_POINT_S:g} s"
    svg = draw_chart("Batch size as the load rises and falls", subtitle, [batches, load])
    return Picture("batches", "requests in a batch over time, as the load rises and falls", svg)


def _sizes(name: str, served: Served, end_s: float, colour: str) -> Line:
    """Means over short times, for the eye."""
    points = []
    for at in range(int(end_s / _POINT_S)):
        start_s = at * _POINT_S
        points.append(
            ((start_s + _POINT_S / 2) / 60, served.mean_size(start_s, start_s + _POINT_S))
        )
    return Line(name, points, colour, has_marks=False)
