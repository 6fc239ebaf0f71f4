"""`quire` with a disk tier on a disk of a given speed, whatever the real one has.

    python -m benchmarks.tiers.slow_disk 500e6 serve MODEL --cache-dir FOLDER ...

Begins like `quire`, behind the bytes a second. Reads and writes of all threads of an engine share
these, one after the other; what the real disk takes counts. `ThrottledFiles` alone can be used in
other processes.
"""

import functools
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from quire.tiers.disk.files import Buffer, Files
from quire.tiers.disk.folder import CacheFolder

_open_unthrottled = CacheFolder.open


class ThrottledFiles(Files):
    """bytes_per_s: of reads and writes together."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_s = 0.0
        self._lock = threading.Lock()

    def preadv(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        begun_s = time.monotonic()
        count = super().preadv(descriptor, buffers, offset)
        self._wait(begun_s, count)
        return count

    def pwritev(self, descriptor: int, buffers: Sequence[Buffer], offset: int) -> int:
        begun_s = time.monotonic()
        count = super().pwritev(descriptor, buffers, offset)
        self._wait(begun_s, count)
        return count

    def _wait(self, begun_s: float, num_bytes: int) -> None:
        with self._lock:
            self._free_s = max(self._free_s, begun_s) + num_bytes / self._bytes_per_s
            wait_s = self._free_s - time.monotonic()
        if wait_s > 0:
            time.sleep(wait_s)


def use_files(files: Files) -> None:
    """Engines that this process builds from now on reach their cache folders through these, until
    others are given."""

    def open_folder(path: Path, _: Files | None = None, wait_s: float = 0.0) -> CacheFolder:
        return _open_unthrottled(path, files, wait_s)

    setattr(CacheFolder, "open", staticmethod(open_folder))  # noqa: B010


def command(bytes_per_s: float) -> list[str]:
    """The command that replaces `python -m quire`."""
    return [sys.executable, "-m", "benchmarks.tiers.slow_disk", f"{bytes_per_s:g}"]


def main(words: Sequence[str]) -> int:
    """Returns the exit status. words: the rate, then what `quire` takes; or, of an engine's
    process, --engine and what that takes."""
    rate, first, *others = words
    if first == "--engine":
        from quire.engine_process import engine_main

        use_files(ThrottledFiles(float(rate)))
        return engine_main.main(others)
    from quire.cli import main as cli
    from quire.server import fleet_launch

    engine = [*command(float(rate)), "--engine"]
    fleet_launch.start_one_engine = functools.partial(  # type: ignore[assignment]
        fleet_launch.start_one_engine, command=engine
    )
    return cli.main([first, *others])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
