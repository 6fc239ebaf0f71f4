"""How far plans are from what is measured: 12 configurations, 3 loads, in turns with calibration.

    python -m benchmarks.planning.validate measure --out FILE [--model MODEL] [--seconds 2]
    python -m benchmarks.planning.validate compare FILE ... [--steadiest 3]

`measure` loads the model once for each of 12 configurations (three of max_num_seqs, two of
max_itl_ratio, with and without int8 weights) and serves all loads with all of them, in `--turns`.
Before and after each it measures what some further steps take. Loads are scaled so that each takes
about the same number of seconds. The costs are fitted to all steps together.

A machine that others use is now and then half as fast, for seconds or minutes, and for some kinds
of work more than for others. So `compare` predicts each run from the costs and from how fast the
machine was just then, by the steps beside the run, with prompts and without; and of each
configuration and load it takes the turns whose steps before and after were most alike. It prints
the median error of these turns, and beside it how far the errors of every other one are from those
of the rest (A/A). `--part 0/2` measures the first half of the configurations only; `compare` takes
the files of all parts. The file is written after each turn.

`--async-scheduling`: engines plan a step while another one runs. `--processor-time`: for a machine
that others use. Engines have one thread, and all times are the process' processor time; see
`serving`.
"""

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks.planning.serving import serve
from quire.assembly.build import build_engine
from quire.assembly.reports.memory_fit import MemoryFit, choose_model, fit_memory
from quire.core.scheduling.cost_model import StepCostModel, StepLoad
from quire.core.scheduling.options import SERVED_MAX_ITL_RATIO
from quire.core.scheduling.pacing import PacingConfig, StepPacer
from quire.engine.engine import Engine
from quire.options.engine_options import EngineOptions
from quire.planning.candidates import as_numbers
from quire.planning.load import LengthLoad, LoadRequest, at_once, draw_lengths
from quire.planning.measuring import MeasuredStep
from quire.planning.plan import engine_shape
from quire.planning.step_bench import StepBench
from quire.planning.step_costs import StepCosts, fit_costs
from quire.planning.virtual_run import run_virtually
from quire.simulation.planned_work import PlannedWork

SEQS, RATIOS, FORMATS = (64, 16, 4), (SERVED_MAX_ITL_RATIO, 0.0), (None, "int8")
BUSY = 0.35
"""Of what the fastest engine can serve, about what comes to all of them in the loads with a rate:
the slowest ones have room for it, too. Beyond what one can serve, times to the first token are
those of a queue that grows as long as the load lasts."""
BOUNDS = {"ttft_p50_s": 0.1, "ttft_p99_s": 0.2, "itl_p50_s": 0.1, "itl_p99_s": 0.2, "rate": 0.1}
CONTEXT = 1100
LEAST_REQUESTS = 24

Runs = dict[str, dict[str, float]]
Beside = dict[str, tuple[list[MeasuredStep], list[MeasuredStep]]]
"""Of each load, steps that were measured before it and after."""


def configurations(
    model: str | None, num_threads: int | None, *, overlaps: bool
) -> list[dict[str, Any]]:
    """The options of each engine."""
    return [
        {
            "model": model,
            "skip_tokenizer_init": True,
            "kv_cache_memory": "384MiB",
            "max_num_seqs": seqs,
            "max_itl_ratio": ratio,
            "quantization": weights,
            "num_threads": num_threads,
            "async_scheduling": overlaps,
            "speculation": "off",  # plans simulate no drafts
        }
        for weights in FORMATS
        for seqs in SEQS
        for ratio in RATIOS
    ]


def loads(token_s: float, seconds: float) -> dict[str, list[LoadRequest]]:
    """By name. token_s: about what a prompt's token takes."""

    def scaled(prompt: tuple[int, int], output: tuple[int, int], shared: int = 0) -> LengthLoad:
        computed = sum(prompt) / 2 - shared
        request_s = token_s * (computed + 2.5 * sum(output) / 2)
        number = max(LEAST_REQUESTS, round(BUSY * seconds / request_s))
        return LengthLoad(prompt, output, BUSY / request_s, number, shared)

    return {
        "chat": draw_lengths(scaled((100, 700), (16, 64))),
        "batch": at_once(draw_lengths(scaled((64, 192), (32, 64)))),
        "shared": draw_lengths(scaled((600, 1000), (8, 48), shared=512)),
    }


def measure(options: argparse.Namespace) -> None:
    """See the module."""
    by_processor = options.processor_time
    overlaps = options.async_scheduling
    every = configurations(options.model, 1 if by_processor else None, overlaps=overlaps)
    part, _, num_parts = options.part.partition("/")
    first, last = (len(every) * (int(part) + more) // int(num_parts) for more in (0, 1))
    named = {str(number): every[number] for number in range(first, last)}
    clock = time.process_time if by_processor else time.perf_counter
    benches = {
        str(weights): Bench(options.model, weights, clock, overlaps=overlaps)
        for weights in {given["quantization"]: None for given in named.values()}
    }
    found: dict[str, Any] = {"model": options.model, "seconds": options.seconds}
    costs = {weights: bench.costs() for weights, bench in benches.items()}
    found["token_s"] = token_s = _token_s(next(iter(costs.values())))
    found["configurations"], found["runs"] = named, {name: [] for name in named}
    beside: dict[str, list[Beside]] = {name: [] for name in named}
    engines = {name: build_engine(given) for name, given in named.items()}
    for name, engine in engines.items():
        named[name]["num_blocks"] = engine.facts["num_blocks"]
        if by_processor:
            its_costs = costs[str(named[name]["quantization"])]
            _count_processor_time(engine, its_costs, named[name]["max_itl_ratio"])
        serve(engine, loads(token_s, 0.01)["chat"], by_processor=by_processor)  # touches memory
    for _ in range(options.turns):
        for name, engine in engines.items():
            bench = benches[str(named[name]["quantization"])]
            runs, steps = _runs(engine, bench, loads(token_s, options.seconds), by_processor)
            found["runs"][name].append(runs)
            beside[name].append(steps)
        costs = {weights: bench.costs() for weights, bench in benches.items()}
        found["costs"] = {weights: each.as_mapping() for weights, each in costs.items()}
        found["slowness"] = {
            name: [_slowness(costs[str(named[name]["quantization"])], each) for each in turns]
            for name, turns in beside.items()
        }
        options.out.write_text(json.dumps(found))


class Bench:
    """Steps with some weights, more with each `measure`."""

    def __init__(
        self,
        model: str | None,
        weights: str | None,
        clock: Callable[[], float],
        *,
        overlaps: bool = False,
    ) -> None:
        given: dict[str, Any] = {"model": model, "skip_tokenizer_init": True}
        given |= {"quantization": weights, "async_scheduling": overlaps}
        given["num_threads"] = 1 if clock is time.process_time else None
        options, fit = _fit({**given, "kv_cache_memory": "384MiB"})
        self._bench = StepBench(options, fit, CONTEXT, clock)
        self._steps = self._bench.measure(0.0)

    def measure(self) -> list[MeasuredStep]:
        """Some further steps, which are returned, too."""
        found = self._bench.measure(0.0)
        self._steps += found
        return found

    def costs(self) -> StepCosts:
        """By all steps so far."""
        return fit_costs(self._steps, self._bench.pacing)


def _slowness(costs: StepCosts, beside: Beside) -> dict[str, list[list[float]]]:
    """How many times as long as predicted the steps took before and after each load, with prompts
    and without."""
    return {
        load: [[_ratio(costs, steps, kind) for kind in (True, False)] for steps in pair]
        for load, pair in beside.items()
    }


def _ratio(costs: StepCosts, steps: Sequence[MeasuredStep], has_prompts: bool) -> float:
    ratios: list[float] = []
    for step in steps:
        if (step.work.load.num_chunk_tokens > 0) == has_prompts:
            usual_s = costs.predict_s(step.work)
            usual_s *= costs.deviation(step.work, usual_s, 0.5)
            ratios += [taken / usual_s for taken in step.seconds]
    return median(ratios)


class SlowedCosts:
    """The `Costs` of a slower machine. `prompts` and `decodes` are the factors on the times of
    steps with and without prompts."""

    def __init__(self, costs: StepCosts, prompts: float, decodes: float) -> None:
        self._costs = costs
        self._prompts, self._decodes = prompts, decodes

    def predict_s(self, work: PlannedWork) -> float:
        """See `Costs`."""
        factor = self._prompts if work.load.num_chunk_tokens else self._decodes
        return factor * self._costs.predict_s(work)

    def deviation(self, work: PlannedWork, predicted_s: float, place: float) -> float:
        """See `Costs`."""
        factor = self._prompts if work.load.num_chunk_tokens else self._decodes
        return self._costs.deviation(work, predicted_s / factor, place)

    def ending_s(self, num_ended: int, num_ended_tokens: int) -> float:
        """See `Costs`."""
        return self._decodes * self._costs.ending_s(num_ended, num_ended_tokens)

    def pacing_model(self) -> StepCostModel:
        """See `Costs`."""
        return self._costs.pacing_model()


def _count_processor_time(engine: Engine, costs: StepCosts, ratio: float) -> None:
    """Let the pacer, too, count processor time, and begin with costs in processor time."""
    engine.clock = time.process_time
    if ratio:
        engine.scheduler.pacer = StepPacer(PacingConfig(ratio), costs.pacing_model(), 0.0)


def _fit(given: dict[str, Any]) -> tuple[EngineOptions, MemoryFit]:
    options = EngineOptions.from_mapping(given)
    return options, fit_memory(options, choose_model(options))


def _token_s(costs: StepCosts) -> float:
    """The seconds per token of a prompt."""
    return costs.pacing_model().predict_s(StepLoad(1, 400, 400, 80_000)) / 400


def _runs(
    engine: Engine, bench: Bench, served: dict[str, list[LoadRequest]], by_processor: bool
) -> tuple[Runs, Beside]:
    """The measurements of each load, and the steps before and after it."""
    runs: Runs = {}
    beside: Beside = {}
    before = bench.measure()
    for name, load in served.items():
        runs[name] = {}
        if load[-1].at_s:
            runs[name] = dict(as_numbers(serve(engine, load, by_processor=by_processor)))
        whole = serve(engine, at_once(load), by_processor=by_processor)
        if not runs[name]:
            runs[name] = dict(as_numbers(whole))
        runs[name]["rate"] = whole.requests_per_s
        after = bench.measure()
        beside[name], before = (before, after), after
    return runs, beside


def steadiest(turns: Sequence[dict[str, list[list[float]]]], load: str, number: int) -> list[int]:
    """The turns whose steps before and after a load were most alike, in order of time."""

    def change(turn: int) -> float:
        before, after = turns[turn][load]
        return max(abs(math.log(one / other)) for one, other in zip(before, after, strict=True))

    return sorted(sorted(range(len(turns)), key=change)[:number])


def _speed(slowness: list[list[float]]) -> tuple[float, float]:
    """Between before and after."""
    prompts, decodes = (math.sqrt(one * other) for one, other in zip(*slowness, strict=True))
    return prompts, decodes


def predict(
    found: dict[str, Any], name: str, load_name: str, speeds: Sequence[Sequence[float]]
) -> list[dict[str, float]]:
    """A run of a configuration on the virtual clock, by how slow the machine is for steps with
    prompts and for others."""
    given = found["configurations"][name]
    kept = {key: value for key, value in given.items() if key != "num_blocks"}
    options, fit = _fit(kept)
    assert fit.num_blocks == given["num_blocks"], (fit, given)
    shape = engine_shape(options, fit)
    costs = StepCosts.from_mapping(found["costs"][str(given["quantization"])])
    load = loads(found["token_s"], found["seconds"])[load_name]
    runs: list[dict[str, float]] = []
    for prompts, decodes in speeds:
        slowed = SlowedCosts(costs, prompts, decodes)
        whole = run_virtually(at_once(load), shape, slowed)
        served = run_virtually(load, shape, slowed) if load[-1].at_s else whole
        runs.append(dict(as_numbers(served)) | {"rate": whole.requests_per_s})
    return runs


def compare(files: Sequence[Path], number: int) -> Iterator[str]:
    """The lines. number: of turns."""
    errors: dict[str, list[float]] = {name: [] for name in BOUNDS}
    apart: dict[str, list[float]] = {name: [] for name in BOUNDS}
    began_s = time.perf_counter()
    rates: dict[tuple[str, str], float] = {}
    foretold: dict[tuple[str, str], float] = {}
    for path in files:
        found = json.loads(path.read_text())
        for weights, each in found["costs"].items():
            accuracy = StepCosts.from_mapping(each).accuracy
            yield f"{path.name}: steps with weights {weights}: {accuracy}"
        for name, runs in found["runs"].items():
            for load in runs[0]:
                turns = steadiest(found["slowness"][name], load, number)
                measured = [runs[turn][load] for turn in turns]
                speeds = [
                    (1.0, 1.0),
                    *(_speed(found["slowness"][name][turn][load]) for turn in turns),
                ]
                usual, *predicted = predict(found, name, load, speeds)
                rates[load, name] = median(run[load]["rate"] for run in runs)
                foretold[load, name] = usual["rate"]
                cells = []
                for quantity in BOUNDS:
                    values = [run[quantity] for run in measured]
                    ratios = [
                        run[quantity] / value for run, value in zip(predicted, values, strict=True)
                    ]
                    error = median(ratios) - 1
                    errors[quantity].append(abs(error))
                    apart[quantity].append(abs(median(ratios[::2]) - median(ratios[1::2])))
                    cells.append(
                        f"{quantity.removesuffix('_s')} {error:+.1%}"
                        f" ({median(values):.4g}, {min(values):.4g} to {max(values):.4g})"
                    )
                yield f"  {name:>2} {load:<7}{'  '.join(cells)}"
    yield f"predicted in {time.perf_counter() - began_s:.1f} s"
    for quantity, bound in BOUNDS.items():
        values, twice = errors[quantity], apart[quantity]
        within = sum(value <= bound for value in values)
        yield (
            f"{quantity:<11} off by {median(values):6.1%} (median), {fmean(values):6.1%} (mean),"
            f" {max(values):6.1%} (most); within {bound:.0%}: {within} of {len(values)};"
            f" A/A {median(twice):.1%}, {fmean(twice):.1%}, {max(twice):.1%}"
        )
    for load in sorted({load for load, _ in rates}):
        chosen = max((rate, key) for key, rate in foretold.items() if key[0] == load)[1]
        best = max(rate for key, rate in rates.items() if key[0] == load)
        yield (
            f"{load}: the best rate foretold, configuration {chosen[1]}, is measured at"
            f" {rates[chosen] / best:.1%} of the best measured"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    actions = parser.add_subparsers(dest="action", required=True)
    measuring = actions.add_parser("measure")
    measuring.add_argument("--model")
    measuring.add_argument("--seconds", type=float, default=2.0)
    measuring.add_argument("--turns", type=int, default=6)
    measuring.add_argument("--part", default="0/1")
    measuring.add_argument("--processor-time", action="store_true")
    measuring.add_argument("--async-scheduling", action="store_true")
    measuring.add_argument("--out", type=Path, required=True)
    comparing = actions.add_parser("compare")
    comparing.add_argument("files", type=Path, nargs="+")
    comparing.add_argument("--steadiest", type=int, default=3, help="turns of each run")
    args = parser.parse_args()
    if args.action == "measure":
        if args.turns < 2:
            parser.error(f"--turns is {args.turns}; two are needed to compare them with each other")
        measure(args)
        return
    if args.steadiest < 2:
        parser.error(f"--steadiest is {args.steadiest}; two turns are compared with each other")
    for line in compare(args.files, args.steadiest):
        print(line)


if __name__ == "__main__":
    main()
