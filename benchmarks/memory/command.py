"""`python -m benchmarks.memory`: paging beside the ways to manage memory that it replaced.

Wires the files of this folder; the command line calls `add_arguments` and `main`. Loads without
torch, so that `--help` is quick.
"""

import argparse
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.memory.load import SHAPES, Budget, MemoryLoad
from quire.bench.baselines.contiguous import KV_ALLOCATORS
from quire.bench.baselines.run_allocators import PLACEMENTS
from quire.errors import ConfigurationError

DEFAULT_SHAPE = "sharegpt"
DEFAULT_PLACEMENT = "buddy"
DEFAULT_SHARING_PROMPTS = 16
DEFAULT_BRANCHES = (2, 4, 6)

_COSTS = {"base_ms": ("base_s", 1e-3), "token_us": ("token_s", 1e-6)}
_COSTS["context_token_us"] = ("context_token_s", 1e-6)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.description = (
        "Carry one load under one budget of KV slots with contiguous reservations (of the longest"
        " length, of the next power of two, of the true length) and with pages: what the memory"
        " holds, how many requests run at once, throughput; and how many blocks branches share."
    )
    _add_load(parser.add_argument_group("load"))
    _add_memory(parser.add_argument_group("memory"))
    _add_simulation(
        parser.add_argument_group(
            "simulation", "The cost of a step on the virtual clock; by default OPT-13B on an A100."
        )
    )
    _add_engine(parser.add_argument_group("engine"))
    _add_output(parser.add_argument_group("output"))


def main(args: argparse.Namespace) -> int:
    """Run, print a table, write the files that were asked for. Returns the exit code.

    Raises ConfigurationError and InvalidRequestError for what can't be measured as asked.
    """
    load, budget = _load(args), _budget(args)
    _check(args)
    # These bring torch, which `--help` and a refused option do without.
    from benchmarks.memory.plot import check_matplotlib, draw
    from benchmarks.memory.results import MemoryResults, table, write_json

    if args.plot is not None:
        check_matplotlib()
    carried = _carry(args, load, budget)
    sharing = _share(args, load, budget) if args.sharing_prompts else []
    results = MemoryResults(_setting(args, load, budget), carried, sharing)
    print(table(results))
    if args.output_json is not None:
        write_json(results, Path(args.output_json))
    if args.plot is not None:
        draw(results, Path(args.plot))
    return 0


def _add_load(group: argparse._ArgumentGroup) -> None:
    load = MemoryLoad()
    group.add_argument(
        "--lengths",
        choices=list(SHAPES),
        default=DEFAULT_SHAPE,
        help="mean lengths and rate of a published data set (sharegpt)",
    )
    group.add_argument(
        "--num-prompts", type=int, metavar="N", default=load.num_prompts, help="requests (600)"
    )
    for flag, text in (
        ("--input-mean", "mean prompt length, in tokens (that of --lengths)"),
        ("--output-mean", "mean output length, in tokens (that of --lengths)"),
    ):
        group.add_argument(flag, type=int, metavar="N", help=text)
    group.add_argument(
        "--request-rate",
        type=float,
        metavar="R",
        help="requests per second, or inf for all at once (that of --lengths; inf with --engine)",
    )
    group.add_argument(
        "--sigma", type=float, default=load.sigma, help=f"spread of the lengths ({load.sigma})"
    )
    group.add_argument(
        "--seed", type=int, metavar="N", default=load.seed, help="of the load (1234)"
    )


def _add_memory(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--allocators",
        nargs="+",
        choices=KV_ALLOCATORS,
        default=list(KV_ALLOCATORS),
        metavar="NAME",
        help=f"which to compare ({' '.join(KV_ALLOCATORS)})",
    )
    group.add_argument(
        "--placement",
        choices=list(PLACEMENTS),
        help="how contiguous runs find their place (buddy)",
    )
    budget = Budget()
    whole: tuple[tuple[str, int, str], ...] = (
        ("--num-slots", budget.num_slots, "tokens that the KV cache holds"),
        ("--block-size", budget.block_size, "tokens in a KV block"),
        ("--max-model-len", MemoryLoad().max_model_len, "tokens in one sequence"),
        ("--max-num-seqs", budget.max_num_seqs, "sequences in one step"),
        ("--max-num-batched-tokens", budget.max_num_batched_tokens, "tokens in one step"),
    )
    for flag, default, text in whole:
        group.add_argument(flag, type=int, metavar="N", default=default, help=f"{text} ({default})")


def _add_simulation(group: argparse._ArgumentGroup) -> None:
    for flag, text in (
        ("--base-ms", "milliseconds of a step, whatever it computes (33.4)"),
        ("--token-us", "microseconds for each token computed (167)"),
        ("--context-token-us", "microseconds for each token of context that is read (1.05)"),
    ):
        group.add_argument(flag, type=float, metavar="T", help=text)


def _add_engine(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--engine", action="store_true", help="run the load on a model, in wall time; no simulation"
    )
    group.add_argument("--model", metavar="MODEL", help="local folder or hub id (embedded model)")
    group.add_argument("--dtype", help="auto, float32, bfloat16 or float16")
    group.add_argument(
        "--sharing-prompts",
        type=int,
        metavar="N",
        default=DEFAULT_SHARING_PROMPTS,
        help="requests that beams are measured on, always on a model; 0 leaves sharing out"
        f" ({DEFAULT_SHARING_PROMPTS})",
    )
    group.add_argument(
        "--branches",
        type=int,
        nargs="+",
        metavar="N",
        default=list(DEFAULT_BRANCHES),
        help="parallel samples, and beams, of each request (2 4 6)",
    )


def _add_output(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--output-json", metavar="FILE", help="write all figures, as JSON")
    group.add_argument("--plot", metavar="FILE", help="draw them, as PNG; needs matplotlib")


def _load(args: argparse.Namespace) -> MemoryLoad:
    shape = SHAPES[args.lengths]
    rate = args.request_rate
    if rate is None:
        rate = math.inf if args.engine else shape.requests_per_s
    return MemoryLoad(
        num_prompts=args.num_prompts,
        input_mean=shape.input_mean if args.input_mean is None else args.input_mean,
        output_mean=shape.output_mean if args.output_mean is None else args.output_mean,
        sigma=args.sigma,
        requests_per_s=rate,
        max_model_len=args.max_model_len,
        seed=args.seed,
    )


def _budget(args: argparse.Namespace) -> Budget:
    return Budget(args.num_slots, args.block_size, args.max_num_seqs, args.max_num_batched_tokens)


def _check(args: argparse.Namespace) -> None:
    """Refuse before the work what would fail after it, or would not be obeyed."""
    for name, value, low in (
        ("sharing_prompts", args.sharing_prompts, 0),
        ("branches", min(args.branches), 2),
    ):
        if value < low:
            raise ConfigurationError(f"{name} is {value}, but must be at least {low}")
    if args.engine:
        given = [name for name in _COSTS if getattr(args, name) is not None]
        if given:
            raise ConfigurationError(
                f"{given[0]} is a cost on the virtual clock, but --engine measures; leave one out"
            )
        if args.placement == "first_fit":
            raise ConfigurationError(
                "placement is 'first_fit', but the engine places runs by buddy; leave out --engine"
            )
    for name in ("output_json", "plot"):
        path = getattr(args, name)
        if path is not None and not Path(path).parent.is_dir():
            raise ConfigurationError(
                f"{name} is {path!r}, but there is no such folder; make it first"
            )


def _carry(args: argparse.Namespace, load: MemoryLoad, budget: Budget) -> dict[str, Any]:
    """Allocator -> what came of it; a line of progress for each."""
    # These bring torch, and this is called only once all options were checked.
    from benchmarks.memory.step_cost import StepCost
    from benchmarks.memory.study import run_engine, simulate
    from quire.bench.compare import say

    budget = Budget(args.num_slots, args.block_size, args.max_num_seqs, args.max_num_batched_tokens)
    given = {
        field: value * unit
        for name, (field, unit) in _COSTS.items()
        if (value := getattr(args, name)) is not None
    }
    cost = StepCost(**given)
    found = {}
    for name in dict.fromkeys(args.allocators):
        if args.engine:
            outcome = run_engine(name, load, budget, _engine_options(args))
        else:
            outcome = simulate(name, load, budget, args.placement or DEFAULT_PLACEMENT, cost)
        found[name] = outcome
        say(
            f"{name}: {outcome.use.mean_running:.1f} requests at once,"
            f" {outcome.use.output_tokens_per_s:.0f} output tokens/s"
        )
    return found


def _share(args: argparse.Namespace, load: MemoryLoad, budget: Budget) -> list[Any]:
    """Measure what parallel samples and beams share. Prints a line for each number of branches."""
    # These bring torch, and this is called only once all options were checked.
    from benchmarks.memory.sharing import Sharing, share
    from quire.bench.compare import say

    spec = Sharing(
        load=load,
        block_size=budget.block_size,
        branches=tuple(sorted(set(args.branches))),
        num_prompts=args.sharing_prompts,
        only_model=args.engine,
        options=_engine_options(args),
    )
    found = []
    for case in share(spec):
        say(f"{case.kind} {case.width}: {case.share:.1%} of the blocks saved")
        found.append(case)
    return found


def _engine_options(args: argparse.Namespace) -> dict[str, Any]:
    return {name: value for name in ("model", "dtype") if (value := getattr(args, name))}


def _setting(args: argparse.Namespace, load: MemoryLoad, budget: Budget) -> dict[str, Any]:
    """The setting of the run, in values that JSON can hold."""
    is_published = (
        (load.input_mean, load.output_mean)
        == (SHAPES[args.lengths].input_mean, SHAPES[args.lengths].output_mean)
        and (budget.num_slots, budget.block_size) == (Budget().num_slots, Budget().block_size)
        and load.max_model_len == MemoryLoad().max_model_len
    )
    model = args.model or "the embedded model"
    rate = load.requests_per_s
    return {
        "shape": args.lengths if is_published else None,
        "mode": f"on {model}, in wall time" if args.engine else "simulated, on a virtual clock",
        "sharing_model": model,
        "placement": args.placement or DEFAULT_PLACEMENT,
        "load": {**asdict(load), "requests_per_s": None if math.isinf(rate) else rate},
        "budget": asdict(budget),
    }
