"""Runs tests in several processes, forks of the one that has collected them: `pytest -n 3`.

To collect all tests, with all that they import, takes 18 seconds of processor time (two Zen 3
cores). Each process of pytest-xdist collects them again.
"""

import fcntl
import mmap
import os
import pickle
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, Pipe, wait
from types import SimpleNamespace
from typing import IO, NoReturn

import pytest

from quire.observability.machine_processors import usable_processors

MAX_PROCESSES = 4
"""By default: each takes up to 1.5 GB."""

SECONDS_TO_TEAR_DOWN = 10.0
"""Time that the processes have for their fixtures when the run is interrupted."""

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

    # The memory is the begin and the end of each range, that of `num_first` before those of the
    # processes, and at last whether the queue was cleared.

    def __init__(
        self, lock_file: IO[bytes], num_first: int, num_tests: int, num_processes: int
    ) -> None:
        """lock_file: an open file for the queue's lock."""
        self._file = lock_file
        self._memory = memoryview(mmap.mmap(-1, 8 * (num_processes + 1) + 4)).cast("i")
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
        """Leave nothing to take, and make all processes leave what they have taken."""
        self._memory[-1] = 1
        with self._locked():
            for place in range(len(self._memory) // 2):
                self._set(place, 0, 0)

    @property
    def is_cleared(self) -> bool:
        """Whether tests that are taken are not to begin any more."""
        return bool(self._memory[-1])

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
    text = config.getoption("processes")
    count = 0 if text == "0" else num_processes(text, usable_processors())
    if count == 0 or config.option.collectonly or config.option.usepdb or session.testsfailed:
        return None
    with tempfile.TemporaryFile() as lock_file:
        queue = Queue(lock_file, num_first, len(session.items), count)
        Controller(session, queue, count).run()
    return True


class Worker:
    """A process that runs tests, as the one knows it that controls it.

    It is the `node` of its reports, which pytest shows and uses as a key. For that it has the
    attributes of pytest-xdist's nodes.
    """

    def __init__(self, number: int, pid: int, connection: Connection) -> None:
        self.number, self.pid, self.connection = number, pid, connection
        self.name = f"process {number}"
        self.gateway = SimpleNamespace(id=self.name)
        self._workerinfocache = f"[{self.name}, id {pid}]"
        #: Index of the test that the process runs, None before its first.
        self.current: int | None = None
        #: Index of the test that it has taken to run next.
        self.following: int | None = None
        #: Whether it has sent its last message. Otherwise its end is a death, whatever its code.
        self.is_done = False


class Controller:
    """Forks the processes, and reports what they send as if the tests had run here.

    A run passes only if the end of each of its tests was reported.
    """

    def __init__(self, session: pytest.Session, queue: Queue, count: int) -> None:
        self._session, self._queue, self._count = session, queue, count
        self._hook = session.config.hook
        factory: pytest.TempPathFactory = vars(session.config)["_tmp_path_factory"]
        self._folder = str(factory.getbasetemp())
        self._workers: dict[Connection, Worker] = {}
        #: Indices of the tests whose end was not reported.
        self._unreported = set(range(len(session.items)))
        #: Errors of processes, not of their tests.
        self._errors: list[str] = []

    def run(self) -> None:
        session = self._session
        reporter = session.config.pluginmanager.getplugin("terminalreporter")
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
            self._stop()
        if self._errors:
            raise RuntimeError("\n".join(self._errors))
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        if session.shouldstop:
            raise session.Interrupted(session.shouldstop)
        if self._unreported:
            names = [session.items[index].nodeid for index in sorted(self._unreported)]
            raise RuntimeError(f"no process has reported the end of {', '.join(names)}")

    def _stop(self) -> None:
        """End the processes that still run: an error, or Ctrl-C, has ended the loop."""
        for worker in self._workers.values():
            worker.connection.close()  # what it sends from now on fails instead of waiting
            os.kill(worker.pid, signal.SIGINT)
        running = {worker.pid for worker in self._workers.values()}
        deadline = time.monotonic() + SECONDS_TO_TEAR_DOWN
        try:
            while running and time.monotonic() < deadline:
                for pid in list(running):
                    if os.waitpid(pid, os.WNOHANG)[0] != 0:
                        running.remove(pid)
                time.sleep(0.02)
        finally:
            for pid in running:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)

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
        except (EOFError, OSError, pickle.UnpicklingError):  # it may have ended amid a message
            self._end(worker)
            return
        if kind == "tests":
            worker.current, worker.following = content
        elif kind == "report":
            report = self._hook.pytest_report_from_serializable(
                config=self._session.config, data=content | {"node": worker}
            )
            self._report(report, worker.current if report.when == "teardown" else None)
        elif kind == "warning":
            message, call = content
            message["category"] = type(message["category"], (Warning,), {})
            call["warning_message"] = warnings.WarningMessage(**message)
            self._hook.pytest_warning_recorded.call_historic(kwargs=call)
        elif kind == "error":
            self._fail(worker, f"has failed:\n{content}")
        else:
            assert kind == "end"
            worker.is_done = True
            shouldfail, shouldstop = content
            self._session.shouldfail = self._session.shouldfail or shouldfail
            self._session.shouldstop = self._session.shouldstop or shouldstop
            self._clear_if_stopped()

    def _report(self, report: pytest.TestReport, ended: int | None) -> None:
        """ended: index of the test if this is its last report, otherwise None."""
        self._hook.pytest_runtest_logreport(report=report)
        if ended is not None:
            self._unreported.discard(ended)
        self._clear_if_stopped()

    def _fail(self, worker: Worker, what: str) -> None:
        """Make the run fail once the other processes have ended their present tests."""
        worker.is_done = True
        self._errors.append(f"{worker.name} of the tests {what}")
        self._queue.clear()

    def _clear_if_stopped(self) -> None:
        if self._session.shouldfail or self._session.shouldstop:
            self._queue.clear()

    def _end(self, worker: Worker) -> None:
        """Report the test that killed its process, and go on with another process."""
        del self._workers[worker.connection]
        worker.connection.close()
        code = os.waitstatus_to_exitcode(os.waitpid(worker.pid, 0)[1])
        if worker.is_done:
            return
        if worker.current is None:
            self._fail(worker, f"ended with {code} before its first test")
            return
        item = self._session.items[worker.current]
        report = pytest.TestReport(
            item.nodeid,
            item.location,
            {},
            "failed",
            f"the process that ran the test ended with {code}",
            "call",
            node=worker,
        )
        self._report(report, worker.current)
        if not self._queue.is_cleared:
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
        # As text, because a warning and what it holds may be of any class.
        message = {
            "message": str(warning_message.message),
            "category": warning_message.category.__name__,
            "filename": warning_message.filename,
            "lineno": warning_message.lineno,
            "line": warning_message.line,
        }
        content = {"when": when, "nodeid": nodeid, "location": location}
        self._connection.send(("warning", (message, content)))


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
        # A process that a test forks must neither send nor delay the end of the connection.
        os.register_at_fork(after_in_child=connection.close)
        try:
            _set_up(session.config, number, connection, folder)
            _run_tests(session, queue, number, first, connection)
        finally:
            # After Ctrl-C, which reaches all processes, the controlling one interrupts this again.
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            session._setupstate.teardown_exact(None)
        session.config._ensure_unconfigure()  # raises what the garbage collector then finds
        connection.send(("end", (session.shouldfail, session.shouldstop)))
        status = 0
    except BaseException:
        connection.send(("error", traceback.format_exc()))
    finally:
        os._exit(status)


def _run_tests(
    session: pytest.Session, queue: Queue, number: int, first: int | None, connection: Connection
) -> None:
    index = queue.take(number) if first is None else first
    while index is not None and not queue.is_cleared:
        following = queue.take(number)
        connection.send(("tests", (index, following)))
        session.config.hook.pytest_runtest_protocol(
            item=session.items[index],
            nextitem=None if following is None else session.items[following],
        )
        if session.shouldfail or session.shouldstop:
            break
        index = following


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
