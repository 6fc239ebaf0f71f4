"""The block size that a plan chooses beside all sizes, measured, on four loads.

    python -m benchmarks.planning.block_sizes --costs FILE [--model MODEL] [--rounds 12]

`--processor-time`: with one thread, by its processor time, for a machine that others use; then the
steps are measured first, and kept in FILE.

All sizes from 8 to 2,048 serve each load, all of it at once, in turns; the engines have the same
bytes of KV memory. FILE is what `quire plan --measure` kept. A machine that others use is now and
then much slower, so sizes are compared within a round. Printed: by size, requests a second, the
median of the rounds, beside those of the chosen size in the same rounds, with what every other
pair of rounds says; what the plan expected; and how the chosen size compares with the best.
"""

import argparse
import time
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.planning.serving import serve
from quire.assembly.build import build_engine
from quire.errors import InsufficientMemoryError
from quire.planning.block_sizes import SIZES
from quire.planning.load import Load, read_load
from quire.planning.plan import Planner
from quire.planning.step_cost_file import StepCostFile

LOADS = {
    "long prompts": ("prompt=400-900,output=8,at_once,requests={}", "256MiB"),
    "short prompts that share": (
        "prompt=160-220,output=4,at_once,requests={},shared=150",
        "256MiB",
    ),
    "long answers": ("prompt=64-128,output=120,at_once,requests={}", "256MiB"),
    "little memory": ("prompt=100-300,output=32,at_once,requests={},shared=64", "12MiB"),
}


def measure(
    given: dict[str, Any], load: Load, rounds: int, by_processor: bool
) -> dict[int, list[float]]:
    """Requests a second of each round, by size."""
    engines = {}
    for size in SIZES:
        try:
            engines[size] = build_engine({**given, "skip_tokenizer_init": True, "block_size": size})
        except InsufficientMemoryError:
            continue
        serve(engines[size], load.requests[:3], by_processor=by_processor)  # touches memory
    rates: dict[int, list[float]] = {size: [] for size in engines}
    for number in range(rounds):
        for size, engine in list(engines.items())[:: -1 if number % 2 else 1]:
            outcome = serve(engine, load.requests, by_processor=by_processor)
            rates[size].append(outcome.requests_per_s)
    return rates


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model")
    parser.add_argument("--costs", type=Path, required=True)
    parser.add_argument("--requests", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--processor-time", action="store_true")
    args = parser.parse_args()
    if args.rounds < 4:
        parser.error(f"--rounds is {args.rounds}; pairs of rounds are compared with each other")
    given: dict[str, Any] = {"model": args.model, "max_model_len": 2048}
    given["num_threads"] = 1 if args.processor_time else None
    if args.processor_time:
        planner = Planner({**given, "kv_cache_memory": "256MiB"}, StepCostFile(args.costs))
        costs = planner.measure("own", "auto", 1000, 5.0, time.process_time)
        print(costs.accuracy)
    for name, (text, memory) in LOADS.items():
        load = read_load(text.format(args.requests))
        given["kv_cache_memory"] = memory
        rates = measure(given, load, args.rounds, args.processor_time)
        asked = {**given, "block_size": "auto", "max_itl_ratio": 0.0}
        planner = Planner(asked, StepCostFile(args.costs))
        found = {each.block_size: each for each in planner.tune(load)}
        chosen = rates[planner.block_size]
        print(f"{name}: {load.name}, {memory}")
        beside: list[float] = []
        for size, values in rates.items():
            ratios = [one / other for one, other in zip(values, chosen, strict=True)]
            beside.append(median(ratios))
            halves = [[each for at, each in enumerate(ratios) if at // 2 % 2 == k] for k in (0, 1)]
            print(
                f"  {size:>5}  measured {median(values):8.2f}/s, {beside[-1]:6.1%} of the chosen"
                f" ({median(halves[0]):.1%}, {median(halves[1]):.1%})"
                f"  expected {found[size].rate:8.2f}/s"
            )
        print(f"  chosen {planner.block_size}: {1 / max(beside):.1%} of the best", flush=True)


if __name__ == "__main__":
    main()
