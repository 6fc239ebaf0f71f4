"""Starts Python programs as forks of a process that has imported torch and quire.

For tests that need a process, but not what it does before `main`: importing torch alone takes two
seconds. Run as a program (`python -m tests.forking FD`), it is the process that forks.
"""

import asyncio
import atexit
import contextlib
import fcntl
import functools
import gc
import importlib
import json
import os
import pkgutil
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import traceback
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn, cast

import quire.server

#: Modules that the forking process imports, besides all modules of quire.server.
IMPORTED = (
    "torch",
    "quire.offline.llm",
    "quire.attention.cpu_paged",
    "quire.engine_process.engine_main",
    "prometheus_client",
    "uvicorn.protocols.http.httptools_impl",
)
LENGTH = struct.Struct("I")
NUMBER = struct.Struct("i")
MAX_FDS = 16


class Fork:
    """A program that runs in a fork. Has what the tests use of `subprocess.Popen`."""

    def __init__(self, words: Sequence[str], status: int) -> None:
        """status: a pipe that brings the process's id, and its exit code once it has ended."""
        self.words = words
        self._status = status
        self.pid: int = self._read_number()
        self.returncode: int | None = None
        self.stdout: IO[str] | None = None

    def _read_number(self) -> int:
        data = os.read(self._status, NUMBER.size)
        assert data, "the forking process has ended"
        number: int = NUMBER.unpack(data)[0]
        return number

    def fileno(self) -> int:
        """A descriptor that is readable once the process has ended."""
        return self._status

    def poll(self) -> int | None:
        """The exit code, or None while the process runs."""
        try:
            return self.wait(0.0)
        except subprocess.TimeoutExpired:
            return None

    def wait(self, timeout: float | None = None) -> int:
        """The exit code. timeout: seconds, after which subprocess.TimeoutExpired is raised."""
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("a fork", timeout or 0.0)
            self.returncode = self._read_number()
            os.close(self._status)
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class AsyncFork:
    """The same for an event loop. Has what the package uses of `asyncio.subprocess.Process`."""

    def __init__(self, fork: Fork) -> None:
        self._fork, self._ended = fork, asyncio.Event()
        self.pid = fork.pid
        # A duplicate, because `Fork.poll` closes its descriptor when the process has ended.
        self._status = os.dup(fork.fileno())
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._status, self._on_end)

    def _on_end(self) -> None:
        self._loop.remove_reader(self._status)
        os.close(self._status)
        self._fork.wait()
        self._ended.set()

    @property
    def returncode(self) -> int | None:
        return self._fork.returncode

    async def wait(self) -> int:
        await self._ended.wait()
        return self._fork.wait()

    def kill(self) -> None:
        self._fork.kill()


class Forks:
    """Starts programs in forks of one process, at the other end of a socket."""

    def __init__(
        self, control: socket.socket, process: subprocess.Popen[bytes] | None = None
    ) -> None:
        """process: the one that forks, if `close` is to wait for it."""
        self._control, self._process = control, process
        self._started: list[Fork] = []

    def start(
        self,
        words: Sequence[str],
        descriptors: Mapping[int, int],
        *,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        start_new_session: bool = False,
    ) -> Fork:
        """Start a command line of Python, such as `python -P -m module argument`.

        descriptors: of the new process -> of this one; 0, 1 and 2 that are left out are /dev/null.
        cwd, env: this process's own if None.
        """
        request = {
            "words": list(words),
            "targets": list(descriptors),
            "cwd": cwd or os.getcwd(),
            "env": dict(os.environ if env is None else env),
            "start_new_session": start_new_session,
        }
        data = json.dumps(request).encode()
        status, theirs = os.pipe()
        fds = [theirs, *descriptors.values()]
        try:
            socket.send_fds(self._control, [LENGTH.pack(len(data))], fds)
        finally:
            os.close(theirs)
        self._control.sendall(data)
        fork = Fork(words, status)
        self._started.append(fork)
        return fork

    def running(self) -> list[Fork]:
        """The forks that were started here and have not ended."""
        self._started = [fork for fork in self._started if fork.poll() is None]
        return list(self._started)

    def run(self, *words: str) -> tuple[int, str]:
        """Run Python with arguments, such as `-c CODE`: the exit code, and all that it printed."""
        with tempfile.TemporaryFile("w+") as output:
            descriptors = dict.fromkeys((1, 2), output.fileno())
            status = self.start([sys.executable, *words], descriptors).wait()
            output.seek(0)
            return status, output.read()

    def close(self) -> None:
        """End the process that forks. Those that it has started run on."""
        self._control.close()
        if self._process is not None:
            self._process.wait()


@functools.cache
def shared_forks() -> Forks:
    """The forks of this test session, in the repository's folder.

    The process that forks starts at the first call. It ends with this process, because fixtures of
    the whole session have forks, too.
    """
    folder = Path(__file__).parent.parent
    ours, theirs = socket.socketpair()
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.forking", str(theirs.fileno())],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(),),
            start_new_session=True,
        )
    forks = Forks(ours, process)
    atexit.register(forks.close)
    return forks


def start_engines_by_forks() -> None:
    """Make asyncio start the engines of this process as forks of this process as it is now."""
    ours, theirs = socket.socketpair()
    if os.fork() == 0:
        ours.close()
        os.setsid()
        _serve_and_run(theirs)
    theirs.close()
    asyncio.create_subprocess_exec = starter(Forks(ours))


def starter(forks: Forks) -> Any:
    """In place of `asyncio.create_subprocess_exec`: starts programs of this Python as forks."""
    start_process = asyncio.create_subprocess_exec

    async def start(
        *words: str, pass_fds: Sequence[int], stdin: int, stdout: int, stderr: int, **options: Any
    ) -> AsyncFork | asyncio.subprocess.Process:
        if words[0] != sys.executable:
            return await start_process(
                *words, pass_fds=pass_fds, stdin=stdin, stdout=stdout, stderr=stderr, **options
            )
        assert stdin == subprocess.DEVNULL
        return AsyncFork(forks.start(words, _descriptors(pass_fds, stdout, stderr), **options))

    return start


def rank_starter(forks: Forks) -> Any:
    """In place of `subprocess.Popen` for ranks: starts their processes as forks."""

    def start(
        words: Sequence[str],
        *,
        pass_fds: Sequence[int],
        stdin: int,
        stdout: int,
        stderr: int,
        **options: Any,
    ) -> Fork:
        assert stdin == subprocess.DEVNULL
        return forks.start(words, _descriptors(pass_fds, stdout, stderr), **options)

    return start


def _descriptors(pass_fds: Sequence[int], stdout: int, stderr: int) -> dict[int, int]:
    """Descriptors of the new process -> of this one. Those that are left out are /dev/null."""
    given = {fd: fd for fd in pass_fds} | {1: stdout, 2: stderr}
    return {number: fd for number, fd in given.items() if fd != subprocess.DEVNULL}


# ---- in the process that forks -------------------------------------------------------------------


def _serve(control: socket.socket) -> list[str] | None:
    """Fork for each request. Returns None when the other end is closed.

    Returns in each fork, too, with its command line.
    """
    wakeup, signalled = socket.socketpair()
    signalled.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(signalled.fileno(), warn_on_full_buffer=False)
    running: dict[int, int] = {}  # process -> the pipe for its exit code
    while True:
        ready, _, _ = select.select([control, wakeup], [], [])
        if wakeup in ready:
            wakeup.recv(1 << 12)
            _report_ended(running)
        if control in ready:
            data, fds, *_ = socket.recv_fds(control, LENGTH.size, MAX_FDS)
            if not data:
                return None
            (length,) = LENGTH.unpack(data)
            request = json.loads(control.recv(length, socket.MSG_WAITALL))
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for end in (control, wakeup, signalled):
                    end.close()
                for pipe in (*running.values(), fds[0]):
                    os.close(pipe)
                _become(request, fds[1:])
                words: list[str] = request["words"]
                return words
            _tell(fds[0], pid)
            running[pid] = fds[0]
            for fd in fds[1:]:
                os.close(fd)


def _report_ended(running: dict[int, int]) -> None:
    """Tell the exit code of each process that has ended."""
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            break
        pipe = running.pop(pid)
        _tell(pipe, os.waitstatus_to_exitcode(status))
        os.close(pipe)


def _tell(pipe: int, number: int) -> None:
    try:
        os.write(pipe, NUMBER.pack(number))
    except BrokenPipeError:
        return  # the reader has ended


def _become(request: Mapping[str, Any], fds: Sequence[int]) -> None:
    """Set up a fork as the request says. fds: received, in the order of its targets."""
    targets = {0, 1, 2, *request["targets"]}
    null = os.open(os.devnull, os.O_RDWR)
    given = dict.fromkeys((0, 1, 2), null) | dict(zip(request["targets"], fds, strict=True))
    # First out of the way, since a descriptor may have the number that another one is to get.
    moved = {
        target: fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, max(targets) + 1)
        for target, fd in given.items()
    }
    for fd in {null, *fds}:
        os.close(fd)
    for target, fd in moved.items():
        os.dup2(fd, target)
        os.close(fd)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    if request["start_new_session"]:
        os.setsid()


def run_python(words: Sequence[str]) -> None:
    """Run what a command line of Python names as the main program. Its options are passed over."""
    rest = list(words[1:])
    while rest[0].startswith("-") and rest[0] not in ("-m", "-c"):
        del rest[: 2 if rest[0] == "-X" else 1]
    if rest[0] == "-m":
        name = rest[1]
        sys.argv = rest[1:]
        sys.modules.pop(name, None)
        runpy.run_module(name, run_name="__main__", alter_sys=True)
        return
    if rest[0] == "-c":
        code, label, sys.argv = rest[1], "<string>", ["-c", *rest[2:]]
    else:
        code, label, sys.argv = Path(rest[0]).read_text(), rest[0], rest
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    if label != "<string>":
        main.__file__ = label
    exec(compile(code, label, "exec"), main.__dict__)


def _serve_and_run(control: socket.socket) -> NoReturn:
    """Serve, and end; in a fork run its program, and end as it does.

    Nothing is torn down: to free torch's objects, a fork would copy the memory that it shares.
    """
    words = _serve(control)
    if words is None:
        os._exit(0)
    status = 1
    try:
        run_python(words)
        status = 0
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        else:
            status = end.code or 0
    except BaseException:
        traceback.print_exc()
    cast(Any, threading)._shutdown()  # waits for threads, as the interpreter does at its end
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # full; closed
            stream.flush()
    os._exit(status)


def _import_modules() -> None:
    of_server = pkgutil.walk_packages(quire.server.__path__, "quire.server.")
    for name in (*IMPORTED, *(module.name for module in of_server)):
        importlib.import_module(name)
    gc.freeze()  # or else each fork's first collection would copy all of this memory


if __name__ == "__main__":
    _import_modules()
    _serve_and_run(socket.socket(fileno=int(sys.argv[1])))
