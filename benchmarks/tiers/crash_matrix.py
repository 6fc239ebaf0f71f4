"""The crash matrix: faults of a cache folder, with a real engine before and after each.

    python -m benchmarks.tiers.crash_matrix [--short] [--only WORD]

Each line of the table is something that goes wrong, in as many ways as it says. Each way is a life
of an engine (in a process of its own, on the embedded model with two KV groups), or several on one
folder: what goes wrong happens between them, or to one of them. Of each is asked that

- its tokens and log-probabilities are those of an engine without a tier, to the bit;
- all requests end, and the process (within a minute);
- no block is held when no request is left, and the ledger's parts are the whole;
- the next engine can use the folder, within its budget, and finds what it should.

--short takes a few ways of each, a minute's worth becomes seconds. Prints a table; the exit status
is 1 if any line failed.
"""

import argparse
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.tiers import crash_places  # noqa: F401  it adds lines to CASES
from benchmarks.tiers.crash_cases import CASES, Matrix
from benchmarks.tiers.engine_lives import Lives


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the table."""

    name: str
    num_ways: int
    num_lives: int
    seconds: float
    found: str
    failure: str | None


def run_case(name: str, matrix: Matrix) -> Line:
    begun_s, lives = time.monotonic(), matrix.lives.num_lives
    matrix.begin()
    failure = None
    try:
        CASES[name](matrix)
    except AssertionError:
        failure = traceback.format_exc()
    return Line(
        name,
        matrix.num_ways,
        matrix.lives.num_lives - lives,
        time.monotonic() - begun_s,
        matrix.summary(),
        failure,
    )


def show(lines: Sequence[Line]) -> None:
    print("\n| what goes wrong | ways | engines | s | what came of it | |")
    print("|---|---|---|---|---|---|")
    for line in lines:
        verdict = "ok" if line.failure is None else "FAILED"
        counts = f"{line.num_ways} | {line.num_lives} | {line.seconds:.1f}"
        print(f"| {line.name} | {counts} | {line.found} | {verdict} |")
    num_failed = sum(line.failure is not None for line in lines)
    num_ways = sum(line.num_ways for line in lines)
    num_lives = sum(line.num_lives for line in lines)
    print(f"\n{len(lines)} lines, {num_ways} ways, {num_lives} engines; {num_failed} lines failed")


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--short", action="store_true", help="a few ways of each")
    parser.add_argument("--only", help="lines that have this word")
    parser.add_argument("--folder", type=Path, help="for cache folders; else one in memory")
    options = parser.parse_args(arguments)
    memory = Path("/dev/shm")
    place = options.folder or (memory if memory.is_dir() else None)
    lines = []
    with tempfile.TemporaryDirectory(prefix="quire-crash-", dir=place) as folder:
        matrix = Matrix(Lives(Path(folder)), is_short=options.short)
        for name in CASES:
            if options.only is None or options.only in name:
                lines.append(run_case(name, matrix))
                last = lines[-1]
                print(f"{last.name}: {last.num_ways} ways, {last.seconds:.1f} s", flush=True)
                if last.failure:
                    print(last.failure, flush=True)
    show(lines)
    return int(any(line.failure is not None for line in lines))


if __name__ == "__main__":
    sys.exit(main())
