"""Starts real servers for the tests: a process, an address, and a bound on every wait."""

import contextlib
import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time

import httpx
import psutil

from quire.config import EngineOptions

WAIT_S = 60.0

PROGRAM = """
import functools, json, sys
from quire.server import launch

spec = json.loads(sys.argv[1])
if spec["command"]:
    start = launch.AsyncEngine.start
    launch.AsyncEngine.start = functools.partial(start, command=spec["command"])
sys.exit(launch.serve(spec["options"], launch.ServerConfig(**spec["server"])))
"""


class RunningServer:
    """A server process. Its output is read in the background, line by line."""

    def __init__(self, process):
        self.process = process
        self.lines = []
        self._queue = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.url = None
        self.engine = None
        self.http = None

    def _read(self):
        for line in self.process.stdout:
            self._queue.put(line)
        self._queue.put(None)

    def wait_for_line(self, pattern):
        deadline_s = time.monotonic() + WAIT_S
        while True:
            line = self._queue.get(timeout=max(0.01, deadline_s - time.monotonic()))
            assert line is not None, f"the server ended: {''.join(self.lines)}"
            self.lines.append(line)
            if found := re.search(pattern, line):
                return found

    def wait_until_ready(self):
        self.url = self.wait_for_line(r"at (http://\S+) ")[1]
        self.http = httpx.Client(base_url=self.url, timeout=WAIT_S)
        (self.engine,) = psutil.Process(self.process.pid).children()

    def signal(self, number):
        """To the whole process group, as a terminal does on Ctrl-C."""
        os.killpg(self.process.pid, number)

    def wait_for_exit(self):
        """The exit code. Also checks that the engine process is gone."""
        code = self.process.wait(WAIT_S)
        if self.engine is not None:
            psutil.wait_procs([self.engine], timeout=WAIT_S)
            assert not self.engine.is_running()
        return code

    def output(self):
        """Everything that was printed, once the process has ended."""
        self._reader.join(WAIT_S)
        while (line := self._queue.get(timeout=WAIT_S)) is not None:
            self.lines.append(line)
        return "".join(self.lines)

    def close(self):
        """Once the process has ended."""
        self._reader.join(WAIT_S)
        self.process.stdout.close()
        if self.http is not None:
            self.http.close()

    def stats(self):
        return self.http.get("/health").json()["engine"]

    def wait_until(self, condition):
        """Poll the engine's numbers until `condition(stats)` holds."""
        deadline_s = time.monotonic() + WAIT_S
        while not condition(stats := self.stats()):
            assert time.monotonic() < deadline_s, stats
            time.sleep(0.01)
        return stats


@contextlib.contextmanager
def launched(options=None, *, command=None, fake=None, wait=True, **server):
    """A running server, ended by force if the test did not end it.

    Its kernels are those that pytest was asked for. command: of the engine process, if not the real
    one; fake: the fake engine's own options.
    """
    options = {"kernels": EngineOptions().kernels} | (options or {})
    spec = {"options": options, "command": command, "server": {"port": 0} | server}
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, json.dumps(spec)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env=os.environ | {"FAKE_ENGINE": json.dumps(fake or {})},
    )
    running = RunningServer(process)
    try:
        if wait:
            running.wait_until_ready()
        yield running
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)
        process.kill()
        process.wait(WAIT_S)
        running.close()
