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
from tests.forking import shared_forks

from quire.options.engine_options import EngineOptions

SEED = 5  # of the servers that tests share
WAIT_S = 60.0
GRAMMARS = "quire.engine_client.process.grammar_main"  # the main module of grammar processes

BY_FORKS = """
from tests.forking import start_engines_by_forks
start_engines_by_forks()
"""
PROGRAM = """
import functools, json, sys
from quire.errors import QuireError
from quire.server import fleet_launch, launch

spec = json.loads(sys.argv[1])
if spec["command"]:
    start = fleet_launch.start_one_engine
    fleet_launch.start_one_engine = functools.partial(start, command=spec["command"])
if "log_format" in spec["server"]:
    launch.log.configure("info", spec["server"]["log_format"])
models = spec.get("models") and [launch.ListedModel(**each) for each in spec["models"]]
try:
    sys.exit(launch.serve(spec["options"], launch.ServerConfig(**spec["server"]), models))
except QuireError as error:  # as the command line does
    sys.exit(f"quire: error: {error}")
"""


class RunningServer:
    """A server process. Its output is read in the background, line by line.

    operator: the headers of its operator's calls, where it has keys.
    """

    def __init__(self, process, *, is_forked=False):
        """process: of `subprocess`, or a `Fork` whose engines are forks, too."""
        self.process = process
        self.is_forked = is_forked
        self.lines = []
        self._queue = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.url = None
        self.engine = None
        self.http = None
        self.operator = {}
        self._children = set()

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
        self.engine = next(iter(self._engines()), None)  # of a fleet the first

    def current_engine(self):
        """The engine process that runs now: after a restart not the first one."""
        deadline_s = time.monotonic() + WAIT_S
        while True:
            living = self._engines()
            if len(living) == 1:
                return living[0]
            assert time.monotonic() < deadline_s, living
            time.sleep(0.01)

    def _engines(self):
        """Running children, but for those that make grammars, and the one that forks engines."""
        found = []
        for child in self._note_children():
            with contextlib.suppress(psutil.NoSuchProcess):
                is_forking = self.is_forked and child.ppid() == self.process.pid
                if is_running(child) and GRAMMARS not in child.cmdline() and not is_forking:
                    found.append(child)
        return found

    def _note_children(self):
        """The children that there are now, which must all be gone in the end."""
        try:
            found = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []
        self._children.update(found)
        return found

    def signal(self, number):
        """To the whole process group, as a terminal does on Ctrl-C."""
        self._note_children()
        os.killpg(self.process.pid, number)

    def wait_for_exit(self):
        """The exit code. Also checks that no engine process is left."""
        self._note_children()
        code = self.process.wait(WAIT_S)
        _, living = psutil.wait_procs(self._children, timeout=WAIT_S)
        assert living == []
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
        return self.http.get("/health", headers=self.operator).json()["engine"]

    def wait_for_restarts(self, number):
        """Until so many deaths of the engine have been noticed."""
        deadline_s = time.monotonic() + WAIT_S
        while self.http.get("/health").json()["num_restarts"] != number:
            assert time.monotonic() < deadline_s
            time.sleep(0.01)

    def wait_until(self, condition):
        """Poll the engine's numbers until there are some and `condition(stats)` holds."""
        deadline_s = time.monotonic() + WAIT_S
        while (stats := self.stats()) is None or not condition(stats):
            assert time.monotonic() < deadline_s, stats
            time.sleep(0.01)
        return stats


def is_running(process):
    """Whether it has not ended; a process that ended and was not waited for yet has."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@contextlib.contextmanager
def launched(
    options=None, *, command=None, fake=None, wait=True, is_forked=True, models=None, **server
):
    """A running server, ended by force if the test did not end it.

    Its kernels are those that pytest was asked for. command: of the engine process, if not the real
    one; fake: the fake engine's own options; is_forked: the server and its engines are forks, which
    need not import all they use; if not, they start as they do outside of tests. models: the fields
    of each entry, for a server of several models.
    """
    options = {"kernels": EngineOptions().kernels} | (options or {})
    for each in models or ():
        each["engine_options"] = options | each.get("engine_options", {})
    spec = json.dumps(
        {"options": options, "command": command, "server": {"port": 0} | server, "models": models}
    )
    env = os.environ | {"FAKE_ENGINE": json.dumps(fake or {})}
    start = start_fork if is_forked else start_process
    process = start([sys.executable, "-c", (BY_FORKS if is_forked else "") + PROGRAM, spec], env)
    running = RunningServer(process, is_forked=is_forked)
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


def start_process(words, env):
    """Start a program, whose output can be read."""
    return subprocess.Popen(
        words,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env=env,
    )


def start_fork(words, env):
    """The same as a fork."""
    output, theirs = os.pipe()
    descriptors = {1: theirs, 2: theirs}
    process = shared_forks().start(words, descriptors, env=env, start_new_session=True)
    os.close(theirs)
    process.stdout = os.fdopen(output)
    return process


@contextlib.contextmanager
def launched_with_keys(folder, options):
    """A server with keys, four generations for each tenant; its `http` has one of alice's two.

    key_file: what it reads further keys from, in `folder`; carol's is in it. dave, erin and fred
    are for test_who_sees_what alone, where no call may have been made in their names before. seed:
    its own.
    """
    file = folder / "keys.txt"
    file.write_text("# who may call, too\ncarol:carol-key-1\n")
    keys = ["alice:alice-key-1", "alice:alice-key-2", "bob:bob-key-1", "operator:operator-key-1"]
    keys += ["dave:dave-key-1", "erin:erin-key-1", "fred:fred-key-1"]
    access = {"api_keys": keys, "api_key_file": str(file), "max_tenant_requests": 4}
    with launched(options, **access) as running:
        running.http.headers["Authorization"] = "Bearer alice-key-1"
        running.operator = {"Authorization": "Bearer operator-key-1"}
        running.key_file, running.seed = file, SEED
        yield running
