"""One engine process and the socket to it, from its start to its end.

A link lives as long as its process: what dies is not started again here. It sends what it is given,
answers questions in their order, kills a process that hangs, hands outputs to its listener and
everything else to its owner. However it ends, no process stays behind.

Knows no requests and no streams. Made by `supervisor`.
"""

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import Any, Protocol, cast

from quire.core.adapters import AdapterRef
from quire.engine_client.activity import ActivityRecord, make_shared_memory
from quire.engine_client.messages import (
    AdapterReply,
    BlocksReply,
    Fatal,
    FindAdapter,
    MemoryReply,
    Outputs,
    Ping,
    Pong,
    Progress,
    Question,
    Ready,
    RequestFailed,
    StatsReply,
    ToFront,
    decode_to_front,
    error_from,
    start_error_from,
)
from quire.engine_client.recovery import Death
from quire.errors import EngineDeadError, QuireError
from quire.ipc import FrameSplitter, MessageError, encode
from quire.observability import log
from quire.observability.machine_memory import num_oom_kills

_REAP_TIMEOUT_S = 2.0
_PULSES_PER_TIMEOUT = 4


class LinkOwner(Protocol):
    """Follows the life of the process: `Supervisor`."""

    def on_progress(self, link: "EngineLink", progress: Progress) -> None:
        """What the process does before it is ready."""
        ...

    def on_ready(self, link: "EngineLink", ready: Ready) -> None:
        """The process takes requests."""
        ...

    def on_death(self, link: "EngineLink", error: QuireError, death: Death) -> None:
        """The process is gone, and everything that it sent was handed on before. `error` says why,
        for people; `death` is the evidence for finding what caused it."""
        ...


class OutputListener(Protocol):
    """Takes what comes of requests: `Dispatcher`."""

    def on_message(self, link: "EngineLink", message: Outputs | RequestFailed) -> None:
        """Outputs of a step, or a request that has failed."""
        ...


class AdapterCalls:
    """What the process is asked of adapters, in any order.

    waiters: by the id of each question that was not answered.
    """

    def __init__(self, send: Callable[[bytes], None]) -> None:
        self.waiters: dict[int, asyncio.Future[AdapterRef]] = {}
        self._ids = count()
        self._send = send

    def find(self, name: str, path: str, anew: bool) -> "asyncio.Future[AdapterRef]":
        """The adapter in a folder, once it was read. Fails with AdapterError, InvalidRequestError,
        and with EngineDeadError if the process dies."""
        find_id = next(self._ids)
        self.waiters[find_id] = waiter = asyncio.get_running_loop().create_future()
        self._send(encode(FindAdapter(find_id, name, path, anew)))
        return waiter

    def take(self, reply: AdapterReply) -> None:
        """An answer has come."""
        waiter = self.waiters.pop(reply.find_id)
        if waiter.done():  # the caller was cancelled
            return
        if reply.ref is not None:
            waiter.set_result(reply.ref)
        else:
            assert reply.failure is not None, "a reply has one of the two"
            waiter.set_exception(error_from(reply.failure))


def _fail(waiters: Iterable["asyncio.Future[Any]"]) -> None:
    """The process is gone. Why it died is for the log: the question may be a client's."""
    for waiter in waiters:
        if not waiter.done():
            waiter.set_exception(EngineDeadError("the engine died before it had answered"))


class EngineLink(asyncio.Protocol):
    """Invariant: `on_death` is called exactly once for a link that was opened, and last."""

    def __init__(self, owner: LinkOwner, listener: OutputListener) -> None:
        """Starts nothing; `open` does."""
        self._owner = owner
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self._process: asyncio.subprocess.Process | None = None
        self._transport: asyncio.WriteTransport | None = None
        self._splitter = FrameSplitter()
        self._waiters: deque[asyncio.Future[dict[str, Any]]] = deque()
        self.adapters = AdapterCalls(self.send)
        self._fatal: Fatal | None = None
        self._killed_because: str | None = None
        self._has_hung = False
        self._record: ActivityRecord | None = None  # what the process writes; from `open` on
        self._num_oom_kills: int | None = None  # when the process was last known to live
        self._reaper: asyncio.Task[None] | None = None
        self._dead = asyncio.Event()
        self._pulse: asyncio.TimerHandle | None = None
        self._asked_s: float | None = None  # since when an answer of the heartbeat is due
        self.last_heard_s = self._loop.time()

    @property
    def pid(self) -> int | None:
        """None before the process was started."""
        return None if self._process is None else self._process.pid

    @property
    def is_open(self) -> bool:
        """Whether there is, or was, a process at the other end, whose death is reported."""
        return self._transport is not None

    async def open(self, command: Sequence[str], start_frame: bytes) -> None:
        """Start the process and send it its options. command: what to run; `--fd N`,
        `--activity-fd M` and the arguments of logging are appended.

        Raises OSError where it can't be started. No process is left when this raises, or is
        cancelled.
        """
        self._num_oom_kills = num_oom_kills()
        with contextlib.ExitStack() as given, contextlib.ExitStack() as undo:
            activity_fd = make_shared_memory()
            given.callback(os.close, activity_fd)
            self._record = ActivityRecord(activity_fd)
            ours, theirs = socket.socketpair()
            given.enter_context(theirs)
            undo.callback(ours.close)
            self._process = await asyncio.create_subprocess_exec(
                *command,
                *("--fd", str(theirs.fileno()), "--activity-fd", str(activity_fd)),
                *log.arguments(),
                pass_fds=(theirs.fileno(), activity_fd),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=sys.__stderr__.fileno() if sys.__stderr__ else None,
                start_new_session=True,  # a terminal's Ctrl-C is for the front to understand
            )
            undo.pop_all()
        try:
            await self._loop.create_unix_connection(lambda: self, sock=ours)
        except BaseException:
            self.kill("it was not wanted any more")
            await self._process.wait()
            raise
        self.send(start_frame)

    def send(self, frame: bytes) -> None:
        """Send an encoded message; to a process that is gone it is not sent."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frame)

    def ask(self, question: Question) -> asyncio.Future[dict[str, Any]]:
        """The answer, from between two steps. Fails with EngineDeadError if the process dies."""
        waiter: asyncio.Future[dict[str, Any]] = self._loop.create_future()
        self._waiters.append(waiter)
        self.send(encode(question))
        return waiter

    def call_between_steps(self, call: Callable[[], None]) -> None:
        """See `async_engine.Wire`."""

        def on_answer(answer: asyncio.Future[dict[str, Any]]) -> None:
            if not answer.cancelled() and answer.exception() is None:
                call()

        self.ask(Ping()).add_done_callback(on_answer)

    def watch(self, timeout_s: float) -> None:
        """From now on, kill the process when it answers nothing for timeout_s."""
        self._num_oom_kills = num_oom_kills()
        now_s, pulse = self._loop.time(), self._pulse
        if pulse is not None and now_s > pulse.when() + timeout_s / _PULSES_PER_TIMEOUT:
            self._asked_s = None  # this process was away itself: an answer may lie unread
        self._pulse = self._loop.call_later(timeout_s / _PULSES_PER_TIMEOUT, self.watch, timeout_s)
        if self._asked_s is None:
            self._asked_s = now_s
            self.call_between_steps(self._note_pulse)
        elif now_s - self._asked_s >= timeout_s:
            self._has_hung = True
            self.kill(
                f"its step had not ended after {timeout_s:g} s, so it was killed"
                " (heartbeat_timeout_s says how long a step may take)"
            )

    def _note_pulse(self) -> None:
        self._asked_s = None

    async def wait_dead(self) -> None:
        """Until the process is gone and the owner was called."""
        await self._dead.wait()

    def kill(self, why: str) -> None:
        """End the process at once; the owner is called when it is gone."""
        if self._process is not None and self._process.returncode is None:
            self._killed_because = self._killed_because or why
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def close(self) -> None:
        """Leave no process behind. Waits for its end; may be called twice."""
        if self._transport is not None:
            self.kill("it was shut down")
            self._transport.close()
            await asyncio.shield(self._dead.wait())

    # ---- asyncio.Protocol -------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Not checked: the transports of other loops (uvloop) are of no such class.
        self._transport = cast(asyncio.WriteTransport, transport)

    def data_received(self, data: bytes) -> None:
        self.last_heard_s = self._loop.time()
        try:
            for body in self._splitter.feed(data):
                self._receive(decode_to_front(body))
        except MessageError as error:
            self._fatal = Fatal(error.code, str(error))
            self.kill("what it sent is no message")
            assert self._transport is not None
            self._transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        self._reaper = self._loop.create_task(self._reap())

    def _receive(self, message: ToFront) -> None:
        match message:
            case Outputs() | RequestFailed():
                self._listener.on_message(self, message)
            case StatsReply(answer) | MemoryReply(answer) | BlocksReply(answer):
                self._answer(answer)
            case Pong():
                self._answer({})
            case AdapterReply():
                self.adapters.take(message)
            case Progress():
                self._owner.on_progress(self, message)
            case Ready():
                self._owner.on_ready(self, message)
            case Fatal():
                self._fatal = message

    def _answer(self, answer: dict[str, Any]) -> None:
        waiter = self._waiters.popleft()
        if not waiter.done():  # else the caller was cancelled, or its time was up
            waiter.set_result(answer)

    async def _reap(self) -> None:
        """The engine's end is closed: wait for the process, by force if need be."""
        process = self._process
        if self._pulse is not None:
            self._pulse.cancel()
        assert process is not None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_REAP_TIMEOUT_S):
                await process.wait()
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        assert process.returncode is not None
        error, death = self._judge(process.returncode)
        _fail(self._waiters)
        _fail(self.adapters.waiters.values())
        self._waiters.clear()
        self._dead.set()
        self._owner.on_death(self, error, death)

    def _judge(self, status: int) -> tuple[QuireError, Death]:
        """Why the process has ended with exit status `status`: for people, and as evidence."""
        assert self._record is not None
        fatal, killed_because = self._fatal, self._killed_because
        before, now = self._num_oom_kills, num_oom_kills()
        rank_status = None if fatal is None else fatal.rank_status
        death = Death(
            self._record.read(),
            rank_status or (None if killed_because is not None else status),
            has_failed=fatal is not None,
            has_hung=self._has_hung,
            num_oom_kills=None if before is None or now is None else now - before,
        )
        if fatal is not None:
            return start_error_from(fatal), death
        if killed_because is not None:
            return EngineDeadError(f"the engine process has ended: {killed_because}"), death
        how = _describe(status, death.num_oom_kills)
        return EngineDeadError(f"the engine process has ended {how}"), death


def _describe(status: int, num_oom_kills: int | None) -> str:
    if status >= 0:
        return f"with exit code {status}"
    names = {member.value: f" ({member.name})" for member in signal.Signals}
    how = f"by signal {-status}{names.get(-status, '')}"  # those for real time have no names
    if status != -signal.SIGKILL:
        return how
    if num_oom_kills is None:
        return f"{how}; the system does that when memory runs out"
    if num_oom_kills:
        return f"{how}: the system did that because memory ran out"
    return f"{how}, from outside: the system has killed nothing here for lack of memory"
