"""A quire server of this checkout for a benchmark: started, measured, ended.

Used by `clients.py`, `http_cost.py` and `fuzz.py`. Needs psutil.
"""

import json
import os
import re
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

START_LIMIT_S = 300.0
END_LIMIT_S = 60.0
SOURCE = Path(__file__).resolve().parents[2] / "src"


class ServingError(RuntimeError):
    """The server did not start, or did not get quiet."""


@dataclass(slots=True)
class Server:
    """A running server: the API server, and the engine that it has started."""

    api_server: psutil.Process
    host: str
    port: int

    @property
    def engine(self) -> psutil.Process:
        """The engine of now: after a crash it is another process."""
        return self.api_server.children()[0]

    def health(self) -> dict[str, Any]:
        """The engine's numbers."""
        url = f"http://{self.host}:{self.port}/health"
        with urllib.request.urlopen(url, timeout=30) as answer:
            return dict(json.load(answer)["engine"])

    def wait_until_quiet(self, limit_s: float = 30.0) -> dict[str, Any]:
        """The engine's numbers once it has no work and holds no block, or the last ones."""
        end_s = time.monotonic() + limit_s
        while True:
            found = self.health()
            names = ("num_running", "num_waiting", "num_held_blocks")
            if not any(found[name] for name in names) or time.monotonic() > end_s:
                return found
            time.sleep(0.05)


def cpu_s(process: psutil.Process) -> float:
    """Processor seconds that all threads of a process have used so far."""
    times = process.cpu_times()
    return float(times.user + times.system)


def resident_bytes(process: psutil.Process) -> int:
    return int(process.memory_info().rss)


@contextmanager
def served(arguments: Sequence[str], log: Path, port: int = 0) -> Iterator[Server]:
    """`quire serve` with these arguments on this machine; ended afterwards.

    log: gets its error output. port: 0 takes any free one.
    """
    command = [sys.executable, "-m", "quire", "serve", "--port", str(port), *arguments]
    # The repository's root is there for plugins, which stand among the benchmarks.
    paths = [str(SOURCE), str(SOURCE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    with log.open("w") as file:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=file, text=True, env=environment
        )
        timer = threading.Timer(START_LIMIT_S, process.kill)
        timer.start()
        try:
            host, port = _address(process, log)
            timer.cancel()
            yield Server(psutil.Process(process.pid), host, port)
        finally:
            timer.cancel()
            process.terminate()
            try:
                process.wait(END_LIMIT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stdout is not None:
                process.stdout.close()


def _address(process: "subprocess.Popen[str]", log: Path) -> tuple[str, int]:
    assert process.stdout is not None
    for line in process.stdout:
        if found := re.search(r"at http://([^:/\s]+):(\d+)", line):
            return found[1], int(found[2])
    raise ServingError(f"the server ended with {process.wait()}: {log.read_text()[-2000:]}")
