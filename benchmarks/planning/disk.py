"""Compares plans with a disk tier with measurements: prompts that come again after eviction.

    python -m benchmarks.planning.disk [--model MODEL] [--prompts 24] [--turns 6] [--folder FOLDER]

An engine whose KV cache holds four prompts serves all prompts three times, each time with another
question after it; so the second and third time they are loaded from the disk tier, which begins
empty. Another engine does the same without the tier. In each turn both serve the load, between
measurements of steps, and of the folder's speed. The plan's prediction for each turn takes the
speeds of that turn. Printed are medians over the turns, and for each quantity the median error of
the predictions.
"""

import argparse
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.planning.serving import serve
from benchmarks.planning.validate import CONTEXT, Bench, SlowedCosts, _fit, _ratio, _token_s
from quire.assembly.build import build_engine
from quire.engine.engine import Engine
from quire.planning.candidates import as_numbers
from quire.planning.disk_bench import measure_disk
from quire.planning.load import LoadRequest
from quire.planning.plan import engine_shape
from quire.planning.step_costs import StepCosts
from quire.planning.virtual_run import RunOutcome, run_virtually
from quire.simulation.virtual_disk import DiskShape, DiskSpeeds
from quire.simulation.virtual_engine import EngineShape

NUM_ROUNDS, NUM_FITTING = 3, 4
QUESTION, ANSWER = 20, 16
BUSY = 0.4
"""Arrival rate of the load, as a share of the rate that an engine without a tier can serve."""
DISK_BYTES = 1 << 30


def draw_load(num_prompts: int, length: int, token_s: float) -> list[LoadRequest]:
    """All prompts in several rounds, each round in another order."""
    rng, load, now_s = random.Random(1), list[LoadRequest](), 0.0
    firsts = [range(1000 * number, 1000 * number + length) for number in range(num_prompts)]
    request_s = token_s * (length + QUESTION + 2.5 * ANSWER)
    for round_number in range(NUM_ROUNDS):
        for number in rng.sample(range(num_prompts), num_prompts):
            now_s += rng.expovariate(BUSY / request_s)
            begin = 1000 * (num_prompts + round_number * num_prompts + number)
            prompt = [*firsts[number], *range(begin, begin + QUESTION)]
            load.append(LoadRequest(now_s, prompt, ANSWER))
    return load


def _figures(outcome: RunOutcome) -> dict[str, float]:
    numbers = dict(as_numbers(outcome))
    return numbers | {"loaded_tokens": float(outcome.loaded_tokens)}


def measured(engine: Engine, load: Sequence[LoadRequest]) -> dict[str, float]:
    """The figures of an engine that serves the load. Its tier is emptied first."""
    moves = engine.scheduler.memory.moves
    before = 0 if moves is None else moves.loads.stats.num_hit_tokens
    outcome = serve(engine, load)
    if moves is not None:
        outcome.loaded_tokens = moves.loads.stats.num_hit_tokens - before
        engine.tier_work.drain()
    return _figures(outcome)


def predicted(
    shape: EngineShape, costs: StepCosts, slowness: Sequence[float], load: Sequence[LoadRequest]
) -> dict[str, float]:
    """The figures that a plan predicts. `slowness` multiplies the times of steps with prompts, and
    of steps without."""
    return _figures(run_virtually(load, shape, SlowedCosts(costs, *slowness)))


def _with_disk(shape: EngineShape, speeds: DiskSpeeds) -> EngineShape:
    return replace(shape, disk=DiskShape(speeds=speeds, num_bytes=DISK_BYTES))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model")
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--length", type=int, default=800, help="tokens of a prompt")
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--folder", type=Path, help="where the tier's folder is made")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="quire-plan-", dir=args.folder) as folder:
        for line in compare(args, Path(folder)):
            print(line)


def compare(args: argparse.Namespace, folder: Path) -> list[str]:
    """The lines of the comparison, to print."""
    # First, the engines, and the load that their steps' times suggest.
    bench = Bench(args.model, None, time.perf_counter)
    load = draw_load(args.prompts, min(args.length, CONTEXT), _token_s(bench.costs()))
    given: dict[str, Any] = {"model": args.model, "skip_tokenizer_init": True}
    given |= {"max_num_seqs": 8, "max_itl_ratio": 0.0, "speculation": "off"}
    given["num_blocks"] = NUM_FITTING * (args.length + QUESTION + ANSWER + 16) // 16
    options, fit = _fit(given)
    tiers = {"cache_dir": str(folder / "kept"), "cache_size": DISK_BYTES}
    engines = {"without": build_engine(given), "with": build_engine({**given, **tiers})}
    for engine in engines.values():
        serve(engine, load[: args.prompts // 4])
    # Then, the turns.
    served: dict[str, list[dict[str, float]]] = {name: [] for name in engines}
    beside, speeds = [bench.measure()], []
    for _ in range(args.turns):
        speeds.append(measure_disk(folder / "measured", fit.groups[0].stored_bytes))
        for name, engine in engines.items():
            served[name].append(measured(engine, load))
        beside.append(bench.measure())
    # Last, what a plan says of each.
    costs, shape = bench.costs(), engine_shape(options, fit)
    foretold: dict[str, list[dict[str, float]]] = {name: [] for name in engines}
    for turn, speed in enumerate(speeds):
        steps = [*beside[turn], *beside[turn + 1]]
        slowness = [_ratio(costs, steps, kind) for kind in (True, False)]
        foretold["without"].append(predicted(shape, costs, slowness, load))
        foretold["with"].append(predicted(_with_disk(shape, speed), costs, slowness, load))
    lines = [f"steps: {costs.accuracy}", f"disk: {speeds[len(speeds) // 2]}"]
    for name, turns in served.items():
        lines.append(f"{name} the tier:")
        for quantity in turns[0]:
            values = [turn[quantity] for turn in turns]
            ratios = [
                turn[quantity] / value
                for turn, value in zip(foretold[name], values, strict=True)
                if value
            ]
            error = f"{median(ratios) - 1:+.1%}" if ratios else "-"
            lines.append(
                f"  {quantity:<20} measured {median(values):.4g}"
                f" ({min(values):.4g} to {max(values):.4g}), plan off by {error}"
            )
    return lines


if __name__ == "__main__":
    main()
