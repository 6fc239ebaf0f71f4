"""How far plans are from what is measured: 12 configurations, 3 loads, in turns with calibration.

    python -m benchmarks.planning.validate measure --out FILE [--model MODEL] [--seconds 2]
    python -m benchmarks.planning.validate compare FILE ...

`measure` loads the model once for each of 12 configurations (three of max_num_seqs, two of
max_itl_ratio, with and without int8 weights), measures what steps take, and serves all loads with
all configurations, three of these in turns, twice. Loads are scaled so that each takes about so
many seconds. `compare` predicts the same runs from the steps and prints the errors, and beside them
how far the two measurements are from each other (A/A). `--part 0/2` measures the first half of the
configurations only; `compare` takes the files of all parts. The file is written after each turn.

`--processor-time`: for a machine that others use. Engines have one thread, and all times are the
process' processor time; see `serving`.
"""

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks.planning.serving import serve
from quire.assembly.build import build_engine
from quire.assembly.reports.memory_fit import MemoryFit, choose_model, fit_memory
from quire.core.scheduling.cost_model import StepLoad
from quire.core.scheduling.pacing import PacingConfig, StepPacer
from quire.engine.engine import Engine
from quire.options.engine_options import EngineOptions
from quire.planning.candidates import as_numbers
from quire.planning.load import LengthLoad, LoadRequest, at_once, draw_lengths
from quire.planning.plan import engine_shape, measure_costs
from quire.planning.step_costs import StepCosts
from quire.planning.virtual_run import run_virtually

SEQS, RATIOS, FORMATS = (64, 16, 4), (2.8, 0.0), (None, "int8")
BUSY = 0.6
"""Of what the engine can serve, what comes to it in the loads with a rate."""
BOUNDS = {"ttft_p50_s": 0.1, "ttft_p99_s": 0.2, "itl_p50_s": 0.1, "itl_p99_s": 0.2, "rate": 0.1}
CONTEXT = 1100
MEASURE_S = 10.0
TURN = 3

Runs = dict[str, dict[str, float]]


def configurations(model: str | None, num_threads: int | None) -> list[dict[str, Any]]:
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
        number = max(12, round(BUSY * seconds / request_s))
        return LengthLoad(prompt, output, BUSY / request_s, number, shared)

    return {
        "chat": draw_lengths(scaled((100, 700), (16, 64))),
        "batch": at_once(draw_lengths(scaled((64, 192), (32, 64)))),
        "shared": draw_lengths(scaled((600, 1000), (8, 48), shared=512)),
    }


def measure(
    model: str | None, seconds: float, part: tuple[int, int], out: Path, by_processor: bool
) -> None:
    """See the module."""
    every = configurations(model, 1 if by_processor else None)
    first, last = (len(every) * (part[0] + more) // part[1] for more in (0, 1))
    named = {str(number): every[number] for number in range(first, last)}
    found: dict[str, Any] = {"model": model, "seconds": seconds, "costs": {}, "runs": {}}
    for weights in {given["quantization"]: None for given in named.values()}:
        found["costs"][str(weights)] = _costs(model, weights, by_processor).as_mapping()
    found["token_s"] = token_s = _token_s(found["costs"])
    engines = {name: build_engine(given) for name, given in named.items()}
    for name, engine in engines.items():
        named[name]["num_blocks"] = engine.facts["num_blocks"]
        costs = StepCosts.from_mapping(found["costs"][str(named[name]["quantization"])])
        if by_processor:
            _count_processor_time(engine, costs, named[name]["max_itl_ratio"])
        serve(engine, loads(token_s, 0.01)["chat"], by_processor=by_processor)  # touches memory
    found["configurations"] = named
    names = list(engines)
    for start in range(0, len(names), TURN):
        for name in 2 * names[start : start + TURN]:
            runs = _runs(engines[name], token_s, seconds, by_processor)
            found["runs"].setdefault(name, []).append(runs)
            out.write_text(json.dumps(found))


def _count_processor_time(engine: Engine, costs: StepCosts, ratio: float) -> None:
    """What steps took is told to the pacer by that clock, too; it begins with what was measured
    so."""
    engine._clock = time.process_time
    if ratio:
        engine.scheduler.pacer = StepPacer(PacingConfig(ratio), costs.pacing_model(), 0.0)


def _costs(model: str | None, weights: str | None, by_processor: bool) -> StepCosts:
    given = {"model": model, "skip_tokenizer_init": True, "quantization": weights}
    given["num_threads"] = 1 if by_processor else None
    options, fit = _fit({**given, "kv_cache_memory": "384MiB"})
    clock = time.process_time if by_processor else time.perf_counter
    return measure_costs(options, fit, CONTEXT, MEASURE_S, clock)


def _fit(given: dict[str, Any]) -> tuple[EngineOptions, MemoryFit]:
    options = EngineOptions.from_mapping(given)
    return options, fit_memory(options, choose_model(options))


def _token_s(costs: dict[str, Any]) -> float:
    """Of a prompt, at the first weights."""
    model = StepCosts.from_mapping(next(iter(costs.values()))).pacing_model()
    return model.predict_s(StepLoad(1, 400, 400, 80_000)) / 400


def _runs(engine: Engine, token_s: float, seconds: float, by_processor: bool) -> Runs:
    runs: Runs = {}
    for name, load in loads(token_s, seconds).items():
        runs[name] = {}
        if load[-1].at_s:
            runs[name] = dict(as_numbers(serve(engine, load, by_processor=by_processor)))
        whole = serve(engine, at_once(load), by_processor=by_processor)
        if not runs[name]:
            runs[name] = dict(as_numbers(whole))
        runs[name]["rate"] = whole.requests_per_s
    return runs


def predict(found: dict[str, Any], seconds: float) -> dict[str, Runs]:
    """The same runs on the virtual clock, by configuration."""
    predicted: dict[str, Runs] = {}
    for name in found["runs"]:
        given = found["configurations"][name]
        kept = {key: value for key, value in given.items() if key != "num_blocks"}
        options, fit = _fit(kept)
        assert fit.num_blocks == given["num_blocks"], (fit, given)
        shape = engine_shape(options, fit)
        costs = StepCosts.from_mapping(found["costs"][str(given["quantization"])])
        predicted[name] = {}
        for load_name, load in loads(found["token_s"], seconds).items():
            whole = run_virtually(at_once(load), shape, costs)
            served = run_virtually(load, shape, costs) if load[-1].at_s else whole
            predicted[name][load_name] = dict(as_numbers(served)) | {"rate": whole.requests_per_s}
    return predicted


def compare(files: Sequence[Path]) -> Iterator[str]:
    """The lines."""
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
        for name, runs in predict(found, found["seconds"]).items():
            for load, numbers in runs.items():
                if len(found["runs"][name]) < 2:
                    continue
                once, again = (run[load] for run in found["runs"][name])
                rates[load, name] = fmean((once["rate"], again["rate"]))
                foretold[load, name] = numbers["rate"]
                for quantity in BOUNDS:
                    middle = fmean((once[quantity], again[quantity]))
                    errors[quantity].append(abs(numbers[quantity] - middle) / middle)
                    apart[quantity].append(abs(once[quantity] - again[quantity]) / middle)
                yield _line(name, load, numbers, once, again)
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


def _line(
    name: str, load: str, numbers: dict[str, float], once: dict[str, float], again: dict[str, float]
) -> str:
    cells = [
        f"{quantity.removesuffix('_s')} {numbers[quantity]:.4g} ({once[quantity]:.4g},"
        f" {again[quantity]:.4g})"
        for quantity in BOUNDS
    ]
    return f"  {name:>2} {load:<7}{'  '.join(cells)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    actions = parser.add_subparsers(dest="action", required=True)
    measuring = actions.add_parser("measure")
    measuring.add_argument("--model")
    measuring.add_argument("--seconds", type=float, default=2.0)
    measuring.add_argument("--part", default="0/1")
    measuring.add_argument("--processor-time", action="store_true")
    measuring.add_argument("--out", type=Path, required=True)
    actions.add_parser("compare").add_argument("files", type=Path, nargs="+")
    args = parser.parse_args()
    if args.action == "compare":
        for line in compare(args.files):
            print(line)
        return
    first, _, number = args.part.partition("/")
    part = (int(first), int(number))
    measure(args.model, args.seconds, part, args.out, args.processor_time)


if __name__ == "__main__":
    main()
