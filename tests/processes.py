"""Runs tests in several processes, forks of the one that has collected them: `pytest -n 3`.

To collect all tests, with all that they import, takes 18 seconds of processor time (two Zen 3
cores). Each process of pytest-xdist collects them again.
"""

import fcntl
import mmap
import os
import signal
import tempfile
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, Pipe, wait
from types import SimpleNamespace
from typing import IO, NoReturn

import pytest

MAX_PROCESSES = 4
"""By default: each takes up to 1.5 GB."""

FOLDER = pytest.StashKey[str]()
"""Folder that the processes of a run share. Only they have it, not the one that has forked them."""


def add_option(parser: pytest.Parser) -> None:
    # `addoption` refuses short options in small letters. pytest-xdist adds its `-n` like this.
    parser.getgroup("processes")._addoption(
        "-n",
        dest="processes",
        metavar="N",
        default="0",
        help="number of processes that run the tests; auto: 3 for 2 processors, and at most"
        f" {MAX_PROCESSES}; 0: the one that collects them",
    )


def num_processes(text: str, num_processors: int) -> int:
    """The number that `-n` asks for.

    `auto` is three for two processors, because tests spend a third of their time waiting for other
    processes and for timeouts.
    """
    if text == "auto":
        return min(MAX_PROCESSES, num_processors + num_processors // 2)
    if not text.isdecimal():
        raise pytest.UsageError(f"-n takes a number of processes or auto, not {text!r}")
    return int(text)


class Queue:
    """Indices of tests, in memory that processes share. Each index is taken exactly once.

    The indices below `num_first` are taken in their order by all processes. Each process has one
    contiguous range of the others, so that fixtures of a module are mostly made once. When its
    range is empty, it takes the second half of the longest one.
    """

    def __init__(
        self, lock_file: IO[bytes], num_first: int, num_tests: int, num_processes: int
    ) -> None:
        """lock_file: an open file for the queue's lock."""
        self._file = lock_file
        self._memory = memoryview(mmap.mmap(-1, 8 * (num_processes + 1))).cast("i")
        share = (num_tests - num_first) / num_processes
        cuts = [0, *(num_first + round(share * number) for number in range(num_processes + 1))]
        for place in range(num_processes + 1):
            self._set(place, cuts[place], cuts[place + 1])

    def take(self, process: int) -> int | None:
        """The next test of a process; None if there is none left."""
        with self._locked():
            own = process + 1
            for place in (0, own):
                begin, end = self._range(place)
                if begin < end:
                    self._set(place, begin + 1, end)
                    return begin
            longest = max(range(1, len(self._memory) // 2), key=self._length)
            begin, end = self._range(longest)
            if begin == end:
                return None
            middle = (begin + end) // 2
            self._set(longest, begin, middle)
            self._set(own, middle + 1, end)
            return middle

    def clear(self) -> None:
        """Leave nothing to take."""
        with self._locked():
            for place in range(len(self._memory) // 2):
                self._set(place, 0, 0)

    def _range(self, place: int) -> tuple[int, int]:
        return self._memory[2 * place], self._memory[2 * place + 1]

    def _length(self, place: int) -> int:
        begin, end = self._range(place)
        return end - begin

    def _set(self, place: int, begin: int, end: int) -> None:
        self._memory[2 * place], self._memory[2 * place + 1] = begin, end

    @contextmanager
    def _locked(self) -> Iterator[None]:
        # A lock of a process, not of a descriptor: it ends with a process that is killed.
        fcntl.lockf(self._file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN)


def run_in_processes(session: pytest.Session, *, num_first: int) -> bool | None:
    """Run the tests of a session in forks. None: they are to run in this process.

    num_first: how many tests begin before all others.
    """
    config = session.config
    count = num_processes(config.getoption("processes"), len(os.sched_getaffinity(0)))
    if count == 0 or config.option.collectonly or config.option.usepdb or session.testsfailed:
        return None
    with tempfile.TemporaryFile() as lock_file:
        queue = Queue(lock_file, num_first, len(session.items), count)
        Controller(session, queue, count).run()
    return True


class Worker:
    """What the controlling process knows of one that runs tests."""

    def __init__(self, number: int, pid: int, connection: Connection) -> None:
        self.number, self.pid, self.connection = number, pid, connection
        name = f"process {number}"
        #: pytest shows its names beside results. It has the attributes of pytest-xdist's nodes.
        self.node = SimpleNamespace(
            gateway=SimpleNamespace(id=name), _workerinfocache=f"[{name}, id {pid}]"
        )
        #: Index of the test that the process runs, None before its first.
        self.current: int | None = None
        #: Index of the test that it has taken to run next.
        self.following: int | None = None


class Controller:
    """Forks the processes, and reports what they send as if the tests had run here."""

    def __init__(self, session: pytest.Session, queue: Queue, count: int) -> None:
        self._session, self._queue, self._count = session, queue, count
        self._hook = session.config.hook
        factory: pytest.TempPathFactory = vars(session.config)["_tmp_path_factory"]
        self._folder = str(factory.getbasetemp())
        self._workers: dict[Connection, Worker] = {}

    def run(self) -> None:
        reporter = self._session.config.pluginmanager.getplugin("terminalreporter")
        if reporter is not None:
            reporter.showfspath = False  # results of several files are mixed
        try:
            for number in range(self._count):
                self._start(number, None)
            while self._workers:
                for connection in wait(list(self._workers)):
                    assert isinstance(connection, Connection)
                    self._receive(self._workers[connection])
        finally:
            for worker in self._workers.values():
                os.kill(worker.pid, signal.SIGKILL)
                os.waitpid(worker.pid, 0)
        if self._session.shouldfail:
            raise self._session.Failed(self._session.shouldfail)
        if self._session.shouldstop:
            raise self._session.Interrupted(self._session.shouldstop)

    def _start(self, number: int, first: int | None) -> None:
        ours, theirs = Pipe()
        pid = os.fork()
        if pid == 0:
            for connection in (ours, *self._workers):
                connection.close()
            _work(self._session, self._queue, number, first, theirs, self._folder)
        theirs.close()
        self._workers[ours] = Worker(number, pid, ours)

    def _receive(self, worker: Worker) -> None:
        try:
            kind, content = worker.connection.recv()
        except EOFError:
            self._end(worker)
            return
        if kind == "tests":
            worker.current, worker.following = content
        elif kind == "report":
            content["node"] = worker.node
            self._report(
                self._hook.pytest_report_from_serializable(
                    config=self._session.config, data=content
                )
            )
        elif kind == "warning":
            self._hook.pytest_warning_recorded.call_historic(kwargs=content)
        else:
            raise RuntimeError(f"process {worker.number} of the tests has failed:\n{content}")

    def _report(self, report: pytest.TestReport) -> None:
        self._hook.pytest_runtest_logreport(report=report)
        if self._session.shouldfail or self._session.shouldstop:
            self._queue.clear()

    def _end(self, worker: Worker) -> None:
        """Report the test that killed its process, and go on with another process."""
        del self._workers[worker.connection]
        worker.connection.close()
        code = os.waitstatus_to_exitcode(os.waitpid(worker.pid, 0)[1])
        if code == 0:
            return
        if worker.current is None:
            raise RuntimeError(f"process {worker.number} of the tests ended with {code}")
        item = self._session.items[worker.current]
        self._report(
            pytest.TestReport(
                item.nodeid,
                item.location,
                {},
                "failed",
                f"the process that ran the test ended with {code}",
                "call",
            )
        )
        if not self._session.shouldfail:
            self._start(worker.number, worker.following)


# ---- in a process that runs tests ----------------------------------------------------------------


class Sender:
    """Sends reports and warnings to the controlling process."""

    def __init__(self, config: pytest.Config, connection: Connection) -> None:
        self._config, self._connection = config, connection

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._connection.send(("report", data))

    def pytest_warning_recorded(
        self,
        warning_message: warnings.WarningMessage,
        when: str,
        nodeid: str,
        location: tuple[str, int, str] | None,
    ) -> None:
        content = {"when": when, "nodeid": nodeid, "location": location}
        self._connection.send(("warning", content | {"warning_message": warning_message}))


class Terminal:
    """Replaces pytest's reporter, for plugins that write stacks to the terminal after a timeout."""

    def __init__(self, config: pytest.Config) -> None:
        #: The name by which `Config.get_terminal_writer` finds it.
        self._tw = config.get_terminal_writer()


def _work(
    session: pytest.Session,
    queue: Queue,
    number: int,
    first: int | None,
    connection: Connection,
    folder: str,
) -> NoReturn:
    """Run tests until none is left. first: index of a test that is already taken, or None."""
    status = 1
    try:
        _set_up(session.config, number, connection, folder)
        index = queue.take(number) if first is None else first
        while index is not None:
            following = queue.take(number)
            connection.send(("tests", (index, following)))
            session.config.hook.pytest_runtest_protocol(
                item=session.items[index],
                nextitem=None if following is None else session.items[following],
            )
            if session.shouldfail or session.shouldstop:
                break
            index = following
        session._setupstate.teardown_exact(None)
        status = 0
    except BaseException:
        connection.send(("error", traceback.format_exc()))
    finally:
        os._exit(status)


def _set_up(config: pytest.Config, number: int, connection: Connection, folder: str) -> None:
    plugins = config.pluginmanager
    # Output is captured in files whose position forks share with this process, so they need others.
    capture = plugins.getplugin("capturemanager")
    capture.stop_global_capturing()
    capture.start_global_capturing()
    if plugins.hasplugin("terminalreporter"):
        terminal = Terminal(config)
        plugins.unregister(name="terminalreporter")
        plugins.register(terminal, "terminalreporter")
    plugins.register(Sender(config, connection))
    config.option.basetemp = os.path.join(folder, f"process-{number}-{os.getpid()}")
    vars(config)["_tmp_path_factory"] = pytest.TempPathFactory.from_config(config, _ispytest=True)
    config.stash[FOLDER] = folder
