"""Checks and measures quire on one GPU, in under ten minutes: one JSON file, one table.

    python benchmarks/gpu.py --out gpu.json --markdown gpu.md
    python benchmarks/gpu.py --sections kernels,speeds
    python benchmarks/gpu.py --small      # a miniature of all of it on the CPU: proves the script

Needs torch, triton and transformers; quire may be this checkout (PYTHONPATH=src). Nothing is
fetched: models have published shapes and random weights, which go to --folder (16 GB).

Each section is a process of its own with a limit of its own, so that one that fails, hangs or takes
the device's context with it leaves the others; its rows are in the files as far as it came. The
exit code is 1 if a section failed, a check did, or a goal was missed. --small runs all of them in
this process, with Triton's interpreter and without goals for times.
"""

import argparse
import importlib
import importlib.metadata
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.tables import markdown

COMMAND = Path(__file__).resolve().parents[1] / "gpu.py"
OUT = Path(tempfile.gettempdir()) / "quire_gpu.json"
LEAST_SECTION_S = 15.0
MODELS_BYTES = 24 << 30


@dataclass(frozen=True, slots=True)
class Section:
    """functions: as "module:function", each of a Bench. limit_s: of the section as a whole."""

    functions: tuple[str, ...]
    limit_s: float


SECTIONS = {
    "kernels": Section(
        ("benchmarks.gpu.checks:check_kernels",),
        200,
    ),
    "speeds": Section(
        (
            "benchmarks.gpu.attention:measure_attention",
            "benchmarks.gpu.kernels:measure_kernels",
            "benchmarks.gpu.block_quantized:measure_block_quantized",
            "benchmarks.gpu.states:measure_states",
        ),
        100,
    ),
    "tokens": Section(
        ("benchmarks.gpu.tokens:check_tokens", "benchmarks.gpu.tokens:check_tensor_parallel"), 100
    ),
    "invariance": Section(("benchmarks.gpu.tokens:check_invariance",), 90),
    "small-model": Section(("benchmarks.gpu.models:measure_small_model",), 90),
    "large-model": Section(("benchmarks.gpu.models:measure_large_model",), 120),
    "utilization": Section(("benchmarks.gpu.utilization:measure_utilization",), 90),
    "allocators": Section(("benchmarks.gpu.peers:measure_allocators",), 120),
    "peers": Section(("benchmarks.gpu.peers:measure_peers",), 120),
    "host-tier": Section(
        (
            "benchmarks.gpu.host_tier:measure_copies",
            "benchmarks.gpu.host_tier:check_swap",
        ),
        60,
    ),
    "memory": Section(("benchmarks.gpu.models:check_memory",), 60),
    "ranks": Section(("benchmarks.gpu.ranks:check_one_rank",), 45),
}
"""By name, in the order in which they run: what others stand on first."""


@dataclass(slots=True)
class Outcome:
    """The outcome of a section. status: "done", "failed", "timed out" or "no time left"."""

    section: str
    status: str
    seconds: float
    error: str = ""


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    args = parse(arguments)
    if args.small:
        # Settled when a kernel's file is imported, which is after this.
        os.environ.setdefault("TRITON_INTERPRET", "1")
    if args.section:
        error = run_section(args.section, args)
        return int(bool(error))
    names = args.sections or list(SECTIONS)
    began_s = time.monotonic()
    folder = Path(args.folder or tempfile.mkdtemp(prefix="quire-gpu-", dir=roomy_folder()))
    folder.mkdir(parents=True, exist_ok=True)
    args.folder, args.rows = str(folder), str(folder / "rows.jsonl")
    Path(args.rows).unlink(missing_ok=True)
    outcomes: list[Outcome] = []
    try:
        for name in names:
            left_s = args.budget_s - (time.monotonic() - began_s)
            outcomes.append(carry_out(name, args, left_s))
            results = write(args, outcomes, began_s)
    finally:
        if not args.keep:
            shutil.rmtree(folder, ignore_errors=True)
    print(markdown(results))
    return int(not results["ok"])


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, default=OUT, help=f"the JSON file ({OUT})")
    parser.add_argument("--markdown", type=Path, help="the table (printed in any case)")
    parser.add_argument(
        "--sections", type=section_names, help=f"comma-separated, of: {', '.join(SECTIONS)} (all)"
    )
    parser.add_argument("--budget-s", type=float, default=580.0, help="for all sections (580)")
    parser.add_argument("--folder", help="for models; kept if it is named, with --keep")
    parser.add_argument("--keep", action="store_true", help="leave the models for another run")
    parser.add_argument("--small", action="store_true", help="a miniature on the CPU")
    for name in ("--section", "--rows"):  # how a section's process is told
        parser.add_argument(name, help=argparse.SUPPRESS)
    parser.add_argument("--limit-s", type=float, default=1e9, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def section_names(text: str) -> list[str]:
    names = text.split(",")
    unknown = sorted(set(names) - set(SECTIONS))
    if unknown:
        known = ", ".join(SECTIONS)
        raise argparse.ArgumentTypeError(f"unknown section {unknown[0]!r}; there are: {known}")
    return names


def roomy_folder() -> str | None:
    """Memory for files, if the models fit there; None: where temporary files go."""
    shared = "/dev/shm"
    has_room = os.path.isdir(shared) and shutil.disk_usage(shared).free > MODELS_BYTES
    return shared if has_room else None


def carry_out(name: str, args: argparse.Namespace, left_s: float) -> Outcome:
    """Run a section in its process, or here for a miniature."""
    limit_s = min(SECTIONS[name].limit_s, left_s)
    if limit_s < LEAST_SECTION_S:
        return Outcome(name, "no time left", 0.0, f"of --budget-s {args.budget_s:g}")
    print(f"== {name}", flush=True)
    began_s = time.monotonic()
    if args.small:
        error = run_section(name, args)
        return Outcome(name, "failed" if error else "done", time.monotonic() - began_s, error)
    command = [sys.executable, str(COMMAND), "--section", name, "--folder", args.folder]
    command += ["--rows", args.rows, "--limit-s", str(limit_s)]
    try:
        with tempfile.TemporaryFile("w+") as errors:
            done = subprocess.run(command, timeout=limit_s, stderr=errors, check=False)
            errors.seek(0)
            said = errors.read()
    except subprocess.TimeoutExpired:
        return Outcome(name, "timed out", time.monotonic() - began_s, f"after {limit_s:.0f} s")
    took_s = time.monotonic() - began_s
    if done.returncode == 0:
        return Outcome(name, "done", took_s)
    print(said[-8000:], file=sys.stderr, flush=True)
    lines = said.strip().splitlines()
    last = lines[-1] if lines else ""
    return Outcome(name, "failed", took_s, f"ended with {done.returncode}: {last}"[:1000])


def run_section(name: str, args: argparse.Namespace) -> str:
    """In this process. Returns what went wrong, or nothing; the section's other functions run."""
    from benchmarks.gpu.harness import Bench  # which brings torch

    bench = Bench(name, Path(args.folder), Path(args.rows), args.small)
    bench.deadline_s = time.monotonic() + args.limit_s
    failures: list[str] = []
    for place in SECTIONS[name].functions:
        module, function = place.split(":")
        try:
            getattr(importlib.import_module(module), function)(bench)
        except Exception as error:  # reported below, in the files and in the exit code
            traceback.print_exc()
            failures.append(f"{function}: {type(error).__name__}: {error}")
    if failures:
        print("; ".join(failures)[:1000], file=sys.stderr)
    return "; ".join(failures)[:1000]


def write(args: argparse.Namespace, outcomes: list[Outcome], began_s: float) -> dict[str, Any]:
    """Both files, as far as the sections have come."""
    path = Path(args.rows)
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    failed = [one for one in outcomes if one.status != "done"]
    results = {
        "ok": not failed and all(row["ok"] is not False for row in rows),
        "small": args.small,
        "seconds": time.monotonic() - began_s,
        "machine": machine(),
        "sections": [asdict(one) for one in outcomes],
        "rows": rows,
    }
    args.out.write_text(json.dumps(results, indent=1) + "\n")
    if args.markdown:
        args.markdown.write_text(markdown(results))
    return results


def machine() -> dict[str, Any]:
    """The machine and the versions of the run; imports no large packages."""
    versions = {}
    for package in ("torch", "triton", "transformers"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "missing"
    from quire.cli.doctor.gpu import read_gpus

    gpus = [f"{one.name}, driver {one.driver}" for one in read_gpus()]
    return {"gpus": gpus, "python": sys.version.split()[0], **versions}


if __name__ == "__main__":
    sys.exit(main())
