"""Lines of the crash matrix about where a folder lies and who else is there."""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from benchmarks.tiers.crash_cases import Matrix, case, segments
from benchmarks.tiers.engine_lives import Life, run_afresh


@case("two processes on one folder")
def _(matrix: Matrix) -> None:
    for _ in range(1 if matrix.is_short else 3):
        with matrix.folder() as folder:
            holder = matrix.lives.begin(Life(folder, closes=False))
            holder.wait_for("stored")
            second = matrix.ends(Life(folder, patience_s=0.2))
            assert f"in use by process {holder.pid};" in second["refused"], second
            matrix.note("refused by name")
            waiting = matrix.lives.begin(Life(folder))
            holder.kill()
            holder.wait()
            ended = waiting.wait()
            matrix.lives.compare(Life(folder), ended.result)
            assert ended.result["loaded"], "taken over"
            matrix.note("taken over")


@contextlib.contextmanager
def mounted(matrix: Matrix, size: str) -> Iterator[Path | None]:
    """A file system of its own in memory; None where this process may not mount one."""
    with matrix.folder(is_empty=True) as place:
        place.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(place)]
        try:
            done = subprocess.run(command, capture_output=True, check=False)
        except FileNotFoundError:
            done = None
        if done is None or done.returncode:
            matrix.note("not mounted: this needs root")
            yield None
            return
        try:
            yield place
        finally:
            subprocess.run(["umount", str(place)], check=True)


@case("a disk that is full")
def _(matrix: Matrix) -> None:
    for size in matrix.few(("200k", "1m", "2m", "8k"), 1):
        with mounted(matrix, size) as place:
            if place is None:
                continue
            result = matrix.ends(Life(place / "cache", seed=1, num_rounds=3))
            if "refused" in result:
                assert "No space left" in result["refused"], result
                matrix.note("refused by name")
                continue
            assert result["disk"]["store_failures"] > 0 and not result["disk"]["is_writing"]
            matrix.serves(Life(place / "cache", seed=1))


@case("files may not grow")
def _(matrix: Matrix) -> None:
    for most_bytes in matrix.few((100_000, 100, 10_000, 300_000), 1):
        with matrix.folder() as folder:
            matrix.serves(Life(folder, seed=5, num_rounds=3, most_file_bytes=most_bytes))
            assert matrix.serves(Life(folder))["disk"]["damaged"] == 0


@case("a read-only folder")
def _(matrix: Matrix) -> None:
    for sealed in (True, False)[: 1 if matrix.is_short else 2]:
        with mounted(matrix, "16m") as place:
            if place is None:
                continue
            folder = place / "cache"
            shutil.copytree(matrix.left(sealed=sealed), folder)
            remount = ["mount", "-o", "remount,ro", str(place)]
            subprocess.run(remount, check=True)
            for _ in range(2):
                result = matrix.serves(Life(folder, num_rounds=2))
                assert result["loaded"] and not result["stored"]
            subprocess.run([*remount[:2], "remount,rw", str(place)], check=True)
            assert matrix.serves(Life(folder, num_rounds=2))["stored"]


@case("a clock that went back")
def _(matrix: Matrix) -> None:
    """The only one that is read across processes is that of files: times of their last change."""
    year_s = 365 * 86400
    for offsets_s in matrix.few(((-50 * year_s,), (100 * year_s,), (100 * year_s, -year_s)), 1):
        for sealed in matrix.few((False, True), 1):
            with matrix.folder(sealed=sealed) as folder:
                for index, path in enumerate(segments(folder)):
                    at_s = path.stat().st_mtime + offsets_s[index % len(offsets_s)]
                    os.utime(path, (at_s, at_s))
                assert matrix.serves(Life(folder))["loaded"]
                matrix.serves(Life(folder, seed=4, num_rounds=4))


@case("torch with another instruction set")
def _(matrix: Matrix) -> None:
    """In processes that are no forks: torch may have chosen by the time of a fork."""
    torch = {"kernels": "torch"}
    for _ in matrix.few((1,), 0):
        with matrix.folder(is_empty=True) as folder:
            assert matrix.serves(Life(folder, options=torch))["stored"]
            other = run_afresh(folder, torch, ATEN_CPU_CAPABILITY="default")
            assert other["loaded"] == 0, "found under another instruction set"
            assert run_afresh(folder, torch)["loaded"]
