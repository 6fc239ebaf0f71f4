"""quire's core beside vLLM's: tables, pool, prefix cache and whole steps, without a model.

    python -m benchmarks.core.comparison --vllm-python VENV/bin/python --rounds 7 --out core.json
    python -m benchmarks.core.comparison --before OTHER_CHECKOUT --rounds 7

Each side is a process in its own environment (`quire_side.py`, `vllm_side.py`) that times one case
at a time. Cases alternate between the sides, and the order of the sides from round to round, so
that a busy or slow moment of the machine meets both. Figures are medians over rounds, by the CPU
clock of the thread, which a busy neighbour disturbs least (it still shares caches and turbo); the
wall clock's are beside them. Each round says how many cores other processes took.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from benchmarks.core.timing import NUM_POOL_BLOCKS, NUM_PREFIX_BLOCKS, NUM_SEQUENCES, Timing
from quire.bench.machine import NOISE_LIMIT_CORES, NoiseMeter, processor

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Case:
    """request: what a side is asked. scale: nanoseconds in one `unit`."""

    title: str
    request: str
    unit: str = "ns"
    scale: float = 1.0


CASES = (
    Case("block-table look-up, one by one", "slot_lookup"),
    Case(f"block-table look-up, {NUM_SEQUENCES} rows at once", "slots_of_batch"),
    Case("allocate + free, one block, no content", "take_release 1"),
    Case("allocate + free, 512 at once, no content", "take_release 512"),
    *(
        Case(f"allocate + evict + publish + free, pool of {size:,}", f"take_publish_release {size}")
        for size in (NUM_POOL_BLOCKS, 8 * NUM_POOL_BLOCKS)
    ),
    Case(f"hash {NUM_PREFIX_BLOCKS:,} blocks", "hash_prefix", "us", 1e3),
    Case(f"find {NUM_PREFIX_BLOCKS:,} blocks", "find_prefix", "us", 1e3),
    Case(f"hash and find {NUM_PREFIX_BLOCKS:,} blocks", "hash_and_find_prefix", "us", 1e3),
    *(
        Case(f"step, {NUM_SEQUENCES} sequences, context {context:,}", f"step {context}", "us", 1e3)
        for context in (500, 2_000, 8_000)
    ),
)


@dataclass(frozen=True, slots=True)
class Sample:
    """One case, on one side, in one round. other_cores: None where the system doesn't say."""

    engine: str
    request: str
    timing: Timing
    other_cores: float | None


class Side:
    """A process that times cases when asked.

    before: a checkout of quire whose package is measured, by this one's benchmark; None: this one.
    """

    def __init__(self, python: str, module: str, before: Path | None = None) -> None:
        self._module = module
        paths = [] if before is None else [str(before.resolve() / "src")]
        self._process = subprocess.Popen(
            [python, "-m", f"benchmarks.core.{module}"],
            cwd=ROOT,
            env=os.environ | ({"PYTHONPATH": os.pathsep.join(paths)} if paths else {}),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            bufsize=1,
        )
        hello = json.loads(self._read_line())
        self.engine, self.version = str(hello["engine"]), str(hello["version"])
        if before is not None:
            self.engine += " before"

    def measure(self, case: Case) -> Sample:
        meter, started_s = NoiseMeter(), time.perf_counter()
        _pipe(self._process.stdin).write(case.request + "\n")
        timing = Timing(**json.loads(self._read_line()))
        elapsed_s = time.perf_counter() - started_s
        others = meter.stop().other_cores  # the side included: only ended children count as ours
        if others is not None:
            others = max(0.0, others - timing.busy_cpu_s / elapsed_s)
        return Sample(self.engine, case.request, timing, others)

    def close(self) -> None:
        _pipe(self._process.stdin).close()
        self._process.wait()

    def _read_line(self) -> str:
        line = _pipe(self._process.stdout).readline()
        if not line:
            raise RuntimeError(
                f"{self._module} ended with {self._process.wait()} before it answered;"
                " run it by hand, with a case on standard input, to see why"
            )
        return line


def _pipe(stream: IO[str] | None) -> IO[str]:
    assert stream is not None
    return stream


def measure_all(sides: list[Side], cases: list[Case], num_rounds: int) -> list[Sample]:
    """All cases in all rounds, the sides taking turns to be first."""
    samples: list[Sample] = []
    for index in range(num_rounds):
        ordered = sides if index % 2 == 0 else sides[::-1]
        for case in cases:
            samples += [side.measure(case) for side in ordered]
        print(f"round {index + 1} of {num_rounds}", file=sys.stderr)
    return samples


# ---- the report -----------------------------------------------------------------------------


def make_table(samples: list[Sample], cases: list[Case], engines: list[str]) -> str:
    """Markdown: medians and their range by CPU time, wall time in brackets, and the ratio."""
    header = ["", *(f"{engine}: CPU median (min to max) [wall]" for engine in engines)]
    header += ["ratio"] * (len(engines) > 1)
    rows = [header, ["---"] + ["---:"] * (len(header) - 1)]
    for case in cases:
        times = {name: _times(samples, case, name) for name in engines}
        row = [f"{case.title}, {case.unit}", *(_cell(*times[name], case) for name in engines)]
        if len(engines) > 1:
            ours, theirs = (statistics.median(times[name][0]) for name in engines)
            row.append(f"{theirs / ours:.2f}x")
        rows.append(row)
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _times(samples: list[Sample], case: Case, engine: str) -> tuple[list[float], list[float]]:
    mine = [one.timing for one in samples if (one.engine, one.request) == (engine, case.request)]
    return [one.cpu_ns for one in mine], [one.wall_ns for one in mine]


def _cell(cpu_ns: list[float], wall_ns: list[float], case: Case) -> str:
    cpu, wall = statistics.median(cpu_ns) / case.scale, statistics.median(wall_ns) / case.scale
    low, high = min(cpu_ns) / case.scale, max(cpu_ns) / case.scale
    return f"{cpu:,.0f} ({low:,.0f} to {high:,.0f}) [{wall:,.0f}]"


def noise_line(samples: list[Sample]) -> str:
    """A line about the load of other processes, which says whether the machine was quiet."""
    others = [one.other_cores for one in samples if one.other_cores is not None]
    if not others:
        return "other processes: the system doesn't say"
    median, most = statistics.median(others), max(others)
    verdict = "quiet" if median <= NOISE_LIMIT_CORES else "NOT quiet: take the CPU times"
    return f"other processes took {median:.2f} cores (median), {most:.2f} at most: {verdict}"


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--vllm-python", help="the interpreter of an environment that has vLLM")
    parser.add_argument("--before", type=Path, help="another checkout of quire to compare with")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cases", default="", help="only those whose title contains this")
    parser.add_argument("--out", type=Path, help="where all samples go, as JSON")
    args = parser.parse_args(argv)
    if args.before and args.vllm_python:
        parser.error("--before and --vllm-python: two sides are compared, so give one of them")
    if args.rounds < 1:
        parser.error(f"--rounds is {args.rounds}, but must be at least 1")
    args.chosen = [case for case in CASES if args.cases in case.title]
    if not args.chosen:
        titles = ", ".join(repr(case.title) for case in CASES)
        parser.error(f"--cases {args.cases!r} is in none of the titles: {titles}")
    return args


def main() -> None:
    args = parse_args()
    sides = [Side(sys.executable, "quire_side")]
    if args.before:
        sides.append(Side(sys.executable, "quire_side", args.before))
    if args.vllm_python:
        sides.append(Side(args.vllm_python, "vllm_side"))
    samples = measure_all(sides, args.chosen, args.rounds)
    for side in sides:
        side.close()
    versions = {side.engine: side.version for side in sides}
    print(make_table(samples, args.chosen, list(versions)))
    print(f"\n{processor()}; {versions}; {args.rounds} rounds; {noise_line(samples)}")
    if args.out:
        machine = {"processor": processor(), "versions": versions}
        result = {"machine": machine, "samples": [asdict(one) for one in samples]}
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
