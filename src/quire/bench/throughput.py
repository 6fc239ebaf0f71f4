"""`quire bench throughput`: measures the engine and baselines on a reproducible load.

The command line calls `add_arguments` and `main`. The module loads without torch, so that `--help`
is quick.
"""

import argparse
from pathlib import Path

from quire.bench.workload import LengthSpec, WorkloadSpec
from quire.errors import ConfigurationError
from quire.plugins import add_plugin_flag

BASELINES = ("static", "hf")
DEFAULT_WIDTHS = (1, 4, 16, 48)
DEFAULT_REPS = 3
DEFAULT_CHOOSING_PROMPTS = 48

_ENGINE_OPTIONS = (
    "model",
    "dtype",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "block_size",
    "kv_cache_memory",
    "num_blocks",
    "enable_prefix_caching",
    "plugins",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.description = (
        "Measure the engine's throughput and latencies: requests of log-normal lengths, all at"
        " t=0, token ids in and out."
    )
    _add_load(parser.add_argument_group("load"))
    _add_engine(parser.add_argument_group("engine", "Without a value: the engine's own default."))
    _add_measuring(parser.add_argument_group("measuring"))


def main(args: argparse.Namespace) -> int:
    """Run the benchmark, print a table, and write the requested files. Returns the exit code.

    Raises ConfigurationError and InvalidRequestError for options that can't be measured.
    """
    workload = _workload_spec(args)
    _check(args)
    # These modules import torch, which `--help` and a refused option don't need.
    from quire.bench.report import table, write_json
    from quire.bench.run import BenchSpec, run

    spec = BenchSpec(
        workload=workload,
        options={
            name: value for name in _ENGINE_OPTIONS if (value := getattr(args, name)) is not None
        },
        baselines=tuple(dict.fromkeys(args.baseline)),
        widths=tuple(sorted(set(args.widths))),
        choosing_prompts=args.choosing_prompts,
        reps=args.reps,
        trace=None if args.trace is None else Path(args.trace),
    )
    results = run(spec)
    print(table(results))
    if args.output_json is not None:
        write_json(results, Path(args.output_json))
    return 0


def _add_load(group: argparse._ArgumentGroup) -> None:
    spec = WorkloadSpec()
    whole: tuple[tuple[str, int, str], ...] = (
        ("--num-prompts", spec.num_prompts, "requests"),
        ("--input-mean", spec.input.mean, "mean prompt length, in tokens"),
        ("--input-min", spec.input.low, "shortest prompt"),
        ("--input-max", spec.input.high, "longest prompt"),
        ("--output-mean", spec.output.mean, "mean output length, in tokens"),
        ("--output-min", spec.output.low, "shortest output"),
        ("--output-max", spec.output.high, "longest output"),
        ("--shared-prefix-tokens", 0, "first tokens that all prompts have in common, in addition"),
        ("--seed", spec.seed, "seed of lengths and tokens"),
    )
    for flag, default, text in whole:
        group.add_argument(flag, type=int, metavar="N", default=default, help=f"{text} ({default})")
    group.add_argument(
        "--sigma", type=float, default=spec.sigma, help=f"spread of the lengths ({spec.sigma})"
    )
    group.add_argument("--limit", type=int, metavar="N", help="run only the first N requests")


def _add_engine(group: argparse._ArgumentGroup) -> None:
    add_plugin_flag(group)
    group.add_argument("--model", metavar="MODEL", help="local folder or hub id (embedded model)")
    group.add_argument("--dtype", help="auto, float32, bfloat16 or float16")
    group.add_argument("--kv-cache-memory", metavar="SIZE", help="memory for the KV cache, as 2GiB")
    for flag, text in (
        ("--max-model-len", "tokens in one sequence"),
        ("--max-num-seqs", "sequences in one step"),
        ("--max-num-batched-tokens", "tokens in one step"),
        ("--block-size", "tokens in a KV block"),
        ("--num-blocks", "KV blocks, instead of a size"),
    ):
        group.add_argument(flag, type=int, metavar="N", help=text)
    group.add_argument(
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        help="share the KV blocks of equal prefixes",
    )


def _add_measuring(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--baseline",
        action="append",
        choices=BASELINES,
        default=[],
        help="also measure static batches on this engine, or transformers' generate; repeatable",
    )
    group.add_argument(
        "--widths",
        type=int,
        nargs="+",
        metavar="N",
        default=list(DEFAULT_WIDTHS),
        help="batch widths that a baseline is tried at (1 4 16 48)",
    )
    group.add_argument(
        "--choosing-prompts",
        type=int,
        metavar="N",
        default=DEFAULT_CHOOSING_PROMPTS,
        help=f"requests that a baseline's width is chosen on ({DEFAULT_CHOOSING_PROMPTS})",
    )
    group.add_argument(
        "--reps",
        type=int,
        metavar="N",
        default=DEFAULT_REPS,
        help=f"rounds; medians are reported ({DEFAULT_REPS})",
    )
    group.add_argument("--output-json", metavar="FILE", help="write all figures, as JSON")
    group.add_argument(
        "--trace", metavar="FILE", help="write each step of quire's rounds, and sum them up"
    )


def _workload_spec(args: argparse.Namespace) -> WorkloadSpec:
    return WorkloadSpec(
        num_prompts=args.num_prompts,
        input=LengthSpec(args.input_mean, args.input_min, args.input_max),
        output=LengthSpec(args.output_mean, args.output_min, args.output_max),
        sigma=args.sigma,
        seed=args.seed,
        shared_prefix_tokens=args.shared_prefix_tokens,
        limit=args.limit,
    )


def _check(args: argparse.Namespace) -> None:
    """Refuse options that would otherwise fail only after the measurements."""
    low = {"reps": args.reps, "choosing_prompts": args.choosing_prompts, "widths": min(args.widths)}
    for name, value in low.items():
        if value < 1:
            raise ConfigurationError(f"{name} is {value}, but must be at least 1")
    if args.output_json is not None and not Path(args.output_json).parent.is_dir():
        raise ConfigurationError(
            f"output_json is {args.output_json!r}, but there is no such folder; make it first"
        )
