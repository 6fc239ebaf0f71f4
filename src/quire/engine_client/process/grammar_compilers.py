"""Makes and compiles grammars in worker processes that can be killed.

A client's grammar is never parsed in the server's own process, since llguidance can take seconds
and gigabytes, or crash. A worker has limits of processor time and memory, and is killed when its
call is cancelled. `grammar_main` is the code of the processes.
"""

import asyncio
import contextlib
import socket
import subprocess
import time
from pathlib import Path

import msgspec

from quire.child_process import child_options, python_command
from quire.engine_client.grammars import LARGE_VOCABULARY
from quire.engine_client.process.grammar_main import (
    FORK,
    KILL,
    MAX_JOB_BYTES,
    MAX_JOB_S,
    Begin,
    Hello,
    Job,
    Made,
    RefusedForm,
)
from quire.errors import EngineDeadError, InvalidRequestError
from quire.ipc import FrameSplitter, decoder, encode
from quire.observability import log
from quire.text.parsers.dialect import Dialect

COMMAND = python_command("quire.engine_client.process.grammar_main")

_END_S = 1.0
_CHUNK_BYTES = 1 << 16

_decode_hello = decoder(Hello, "a worker for grammars")
_decode_reply = decoder(Made | RefusedForm, "a worker for grammars")


class _WorkerEndedError(Exception):
    """The worker's process is gone."""


class WorkerLostError(InvalidRequestError):
    """A worker ended before it had used up its processor time. The form took too much memory, or
    another process killed the worker, so the call may be retried."""


class _Worker:
    """The client's end of one worker. Invariant: at most one job runs at a time."""

    def __init__(self, sock: socket.socket) -> None:
        """Take ownership of `sock`."""
        sock.setblocking(False)
        self.sock = sock
        self.pid: int | None = None
        self._splitter = FrameSplitter()

    @property
    def is_idle_and_alive(self) -> bool:
        """Whether the worker has no job and its process is still alive."""
        try:
            self.sock.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    async def work(self, form: str) -> Made | RefusedForm:
        """Do one job. Raises _WorkerEndedError."""
        loop = asyncio.get_running_loop()
        try:
            if self.pid is None:
                hello = _decode_hello(await self._next(loop))
                self.pid = hello.pid
            await loop.sock_sendall(self.sock, encode(Job(form)))
            reply: Made | RefusedForm = _decode_reply(await self._next(loop))
            return reply
        except OSError as error:
            raise _WorkerEndedError from error

    async def _next(self, loop: asyncio.AbstractEventLoop) -> bytes:
        while True:
            data = await loop.sock_recv(self.sock, _CHUNK_BYTES)
            if not data:
                raise _WorkerEndedError
            for body in self._splitter.feed(data):
                return body


class GrammarCompilers:
    """The grammar process of one model and its workers. Belongs to one event loop, but `begin`
    and `close` may be called from any thread."""

    def __init__(
        self,
        folder: Path,
        vocab_size: int,
        dialect: Dialect,
        command: tuple[str, ...] = COMMAND,
    ) -> None:
        """Starts no process yet. `folder` has the tokenizer; `vocab_size` is that of the model.
        `--fd N` and the arguments of logging are appended to `command`."""
        self._begin = Begin(str(folder), vocab_size, dialect)
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._idle: list[_Worker] = []

    def begin(self) -> None:
        """Start the process now if the vocabulary is large, since reading it takes long."""
        if self._begin.vocab_size >= LARGE_VOCABULARY:
            self._start()

    def limit_to(self, vocab_size: int) -> None:
        """Restrict grammars to token ids below the model's `vocab_size`."""
        if vocab_size < self._begin.vocab_size:
            self.close()
            self._begin = msgspec.structs.replace(self._begin, vocab_size=vocab_size)

    async def make(self, form: str, origin: str) -> str | None:
        """The grammar of `form`, checked to compile; None if the form sets no constraint.

        `form` is a text from `grammar_forms.as_text`. `origin` is the request field that the form
        comes from; errors name it if the worker ends without a reply. A cancelled call kills its
        worker. Raises InvalidRequestError for a form that is not supported or exceeds the limits
        (WorkerLostError if something else may have killed the worker), and EngineDeadError if there
        is no process.
        """
        worker = self._acquire_worker()
        is_kept, began_s = False, time.monotonic()
        try:
            reply = await worker.work(form)
            is_kept = not reply.is_last
        except _WorkerEndedError as error:
            # A worker that never reported its id means that the process itself is gone.
            if worker.pid is None:
                self._forget_process()
                raise EngineDeadError(
                    "the process that makes grammars has ended; retry later, or without"
                    " structured outputs"
                ) from error
            # A worker that has not used up its time may have been killed for another reason.
            may_be_another = time.monotonic() - began_s < MAX_JOB_S
            kind = WorkerLostError if may_be_another else InvalidRequestError
            raise kind(
                f"{origin}: compiling it takes more than {MAX_JOB_S:g} s of processor time or"
                f" {MAX_JOB_BYTES >> 20} MiB of memory, or ends the compiler; simplify it: fewer"
                " alternatives, repetitions and expressions for one text",
                origin,
            ) from error
        finally:
            if is_kept:
                self._idle.append(worker)
            else:
                self._end(worker)
        if isinstance(reply, RefusedForm):
            raise InvalidRequestError(reply.message, reply.param)
        return reply.grammar

    def close(self) -> None:
        """End the process and all its workers at once. May be called twice."""
        self._forget_process()

    def _acquire_worker(self) -> _Worker:
        try:
            self._start()
            while self._idle:
                worker = self._idle.pop()
                if worker.is_idle_and_alive:
                    return worker
                worker.sock.close()
            return self._fork_worker()
        except OSError as error:
            self._forget_process()
            raise EngineDeadError(
                f"the process that makes grammars can't be started: {error}; retry later"
            ) from error

    def _fork_worker(self) -> _Worker:
        assert self._control is not None
        ours, theirs = socket.socketpair()
        with theirs, contextlib.ExitStack() as undo:
            undo.callback(ours.close)
            socket.send_fds(self._control, [FORK], [theirs.fileno()], socket.MSG_DONTWAIT)
            undo.pop_all()
        return _Worker(ours)

    def _end(self, worker: _Worker) -> None:
        """End a worker: an idle one ends when its socket is closed, a busy one is killed."""
        worker.sock.close()
        if worker.pid is not None and self._control is not None:
            with contextlib.suppress(OSError):  # then the process and its workers are gone already
                self._control.send(KILL + b"%d" % worker.pid, socket.MSG_DONTWAIT)

    def _start(self) -> None:
        if self._process is not None and self._process.poll() is None:
            return
        self._forget_process()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, contextlib.ExitStack() as undo:
            undo.callback(ours.close)
            self._process = subprocess.Popen(
                [*self._command, "--fd", str(theirs.fileno()), *log.arguments()],
                pass_fds=(theirs.fileno(),),
                **child_options(),
            )
            ours.send(msgspec.msgpack.encode(self._begin))
            undo.pop_all()
        self._control = ours

    def _forget_process(self) -> None:
        """End the process and its workers by closing the control socket."""
        for worker in self._idle:
            worker.sock.close()
        self._idle.clear()
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._process is not None:
            try:
                self._process.wait(_END_S)
            except subprocess.TimeoutExpired:  # the process is still reading the tokenizer
                self._process.kill()
                self._process.wait()
            self._process = None
