"""The command line of `python -m benchmarks.claims`: each promise of paging with its baseline.

Wires the studies of this folder. Loads without torch, so that `--help` is quick.
"""

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from quire.errors import ConfigurationError

if TYPE_CHECKING:
    from benchmarks.claims.claim import Study

STUDIES = (
    "memory",
    "latency",
    "throughput",
    "fragmentation",
    "lookups",
    "contexts",
    "sharing",
    "beams",
    "batches",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.description = (
        "Measure what the literature promises of paged KV memory: one line a promise, with its"
        " source, our figure, a baseline in the same run, and whether it holds. About ten minutes"
        " on two cores."
    )
    studies = parser.add_argument_group("studies")
    studies.add_argument(
        "--only",
        nargs="+",
        choices=STUDIES,
        metavar="NAME",
        help=f"measure only these ({' '.join(STUDIES)})",
    )
    studies.add_argument(
        "--quick",
        action="store_true",
        help="the smallest sizes, seconds in all: shows that everything runs; its figures and"
        " verdicts mean little",
    )
    studies.add_argument(
        "--model",
        metavar="MODEL",
        help="local folder or hub id, for beams, throughput and the size of pages (embedded model)",
    )
    output = parser.add_argument_group("output")
    output.add_argument("--markdown", metavar="FILE", help="write a page with all of it")
    output.add_argument(
        "--pictures",
        metavar="FOLDER",
        help="write the curves, as SVG; the page of --markdown links them",
    )
    output.add_argument("--output-json", metavar="FILE", help="write the table, as JSON")


def main(args: argparse.Namespace) -> int:
    """Measure, print a line for each promise, write what was asked for. Returns the exit code.

    Raises ConfigurationError for a place that can't be written to, before the work.
    """
    _check(args)
    # These bring torch, which `--help` and a refused option do without.
    from benchmarks.claims.claim import Setting
    from benchmarks.claims.page import claim_lines, make_page, noise_line, write_pictures
    from quire.bench.compare import say
    from quire.bench.machine import NoiseMeter

    meter = NoiseMeter()
    setting = Setting(args.quick, args.model)
    results = []
    for name, study in _studies().items():
        if args.only is None or name in args.only:
            say(f"{name} ...")
            result = study(setting)
            print("\n".join(claim_lines(result)), flush=True)
            results.append(result)
    noise = meter.stop()
    print(noise_line(noise))
    pictures = None if args.pictures is None else Path(args.pictures)
    if pictures is not None:
        write_pictures(results, pictures)
    if args.markdown is not None:
        path = Path(args.markdown)
        path.write_text(make_page(results, setting, noise, path, pictures), encoding="utf-8")
    if args.output_json is not None:
        claims = [asdict(claim) for result in results for claim in result.claims]
        Path(args.output_json).write_text(json.dumps(claims, indent=1) + "\n")
    return 0


def _studies() -> "dict[str, Study]":
    """In the order of STUDIES."""
    # These bring torch, and this is called only once all options were checked.
    from benchmarks.claims.batch_sizes import study_batches
    from benchmarks.claims.beam_speed import study_beams
    from benchmarks.claims.branches import study_branches
    from benchmarks.claims.contexts import study_contexts
    from benchmarks.claims.crowds import study_latency, study_memory
    from benchmarks.claims.operations import study_fragmentation, study_lookups
    from benchmarks.claims.saturated import study_throughput

    studies = (
        study_memory,
        study_latency,
        study_throughput,
        study_fragmentation,
        study_lookups,
        study_contexts,
        study_branches,
        study_beams,
        study_batches,
    )
    return dict(zip(STUDIES, studies, strict=True))


def _check(args: argparse.Namespace) -> None:
    """Refuse before the work what would fail after it."""
    for name in ("markdown", "output_json"):
        path = getattr(args, name)
        if path is not None and not Path(path).parent.is_dir():
            raise ConfigurationError(
                f"{name} is {path!r}, but there is no such folder; make it first"
            )
    if args.pictures is not None and not Path(args.pictures).is_dir():
        raise ConfigurationError(
            f"pictures is {args.pictures!r}, but there is no such folder; make it first"
        )
