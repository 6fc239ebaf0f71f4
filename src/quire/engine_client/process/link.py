"""Link to one engine process, from its start to its end.

A link lives as long as its engine's process and never restarts it. It sends messages, matches
answers to questions in order, and kills a process that hangs. Outputs go to the link's listener,
other events to its owner. Subclasses start and end the process: `process_link` on this machine,
`cluster.machines.remote_link` on another.

It does not track requests or streams. Made by `supervisor`.
"""

import asyncio
import secrets
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable
from itertools import count
from typing import Any, ClassVar, Protocol, TypeAlias, cast

from quire.core.adapters import AdapterRef
from quire.engine_client.messages import (
    AdapterReply,
    BlocksReply,
    Fatal,
    FindAdapter,
    MemoryReply,
    ObserveReply,
    Outputs,
    Ping,
    Pong,
    Progress,
    Question,
    Ready,
    RequestFailed,
    StatsReply,
    ToServer,
    decode_to_server,
    error_from,
)
from quire.engine_client.process.activity import Pace
from quire.engine_client.process.outgoing_frames import Frame, OutgoingFrames
from quire.engine_client.recovery import LEAST_STEP_LIMIT_S, Death, step_limit_s
from quire.errors import EngineDeadError, QuireError
from quire.ipc import FrameSplitter, MessageError, encode

_PULSES_PER_TIMEOUT = 4
_FIRST_ID_BITS = 48

UNDEAD_S = 20.0
"""Seconds after a kill at which a process that still exists is given up: a process that waits in
the kernel for a file server or a driver can't be ended. Releasing much memory takes seconds,
too."""


class LinkOwner(Protocol):
    """Handles the events of the process; implemented by `Supervisor`."""

    def on_progress(self, link: "EngineLink", progress: Progress) -> None:
        """The process reports its progress before it is ready."""
        ...

    def on_ready(self, link: "EngineLink", ready: Ready) -> None:
        """The process takes requests."""
        ...

    def on_death(self, link: "EngineLink", error: QuireError, death: Death) -> None:
        """The process is gone, and all its messages were passed on. `error` tells people the
        reason; from `death`, the supervisor infers the cause."""
        ...


class OutputListener(Protocol):
    """Receives the outputs of requests; implemented by `FleetEngine`."""

    def on_message(self, link: "EngineLink", message: Outputs | RequestFailed) -> None:
        """Handle the outputs of a step, or the failure of a request."""
        ...


class AdapterCalls:
    """Questions about adapters, which the process may answer in any order."""

    def __init__(self, send: Callable[[bytes], None]) -> None:
        #: The unanswered questions by their ids.
        self.waiters: dict[int, asyncio.Future[AdapterRef]] = {}
        # The first id is random, because a process behind an agent outlives its links and may still
        # answer an earlier one.
        self._ids = count(secrets.randbits(_FIRST_ID_BITS))
        self._send = send

    def find(self, name: str, path: str, anew: bool) -> "asyncio.Future[AdapterRef]":
        """The adapter in a folder, once the process has read it. Fails with AdapterError or
        InvalidRequestError, and with EngineDeadError if the process dies."""
        find_id = next(self._ids)
        self.waiters[find_id] = waiter = asyncio.get_running_loop().create_future()
        self._send(encode(FindAdapter(find_id, name, path, anew)))
        return waiter

    def resolve(self, reply: AdapterReply) -> None:
        """Resolve the question that `reply` answers, if this link has asked it."""
        waiter = self.waiters.pop(reply.find_id, None)
        if waiter is None or waiter.done():  # asked by an earlier link, or its caller was cancelled
            return
        if reply.ref is not None:
            waiter.set_result(reply.ref)
        else:
            assert reply.failure is not None, "a reply has one of the two"
            waiter.set_exception(error_from(reply.failure))


def _fail(waiters: Iterable["asyncio.Future[Any]"]) -> None:
    """Fail all questions of a dead process. The error may be sent to a client, so it leaves out the
    reason, which is in the log."""
    for waiter in waiters:
        if not waiter.done():
            waiter.set_exception(EngineDeadError("the engine died before it had answered"))


class EngineLink(asyncio.Protocol):
    """A link to an engine process.

    Invariant: `on_death` is called exactly once for a link that was opened, as its last call. After
    a `kill`, the call comes within UNDEAD_S plus some seconds, even if the process does not end.
    """

    #: Whether the process ends, with all its memory, when it is told to shut down.
    ends_process: ClassVar[bool] = True

    def __init__(self, owner: LinkOwner, listener: OutputListener) -> None:
        """Create the link without a process; `open` starts it."""
        self._owner = owner
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.WriteTransport | None = None
        self._outgoing = OutgoingFrames()
        self._splitter = FrameSplitter()
        self._waiters: deque[asyncio.Future[dict[str, Any]]] = deque()
        self.adapters = AdapterCalls(self.send)
        self._fatal: Fatal | None = None
        self._killed_because: str | None = None
        self._has_hung = False
        self._reaper: asyncio.Task[None] | None = None
        self._undead: asyncio.TimerHandle | None = None
        self._is_aborted = False
        self._dead = asyncio.Event()
        self._pulse: asyncio.TimerHandle | None = None
        #: When the oldest unanswered heartbeat ping was sent or, if later, when the process last
        #: made progress; None if all pings are answered.
        self._silent_since_s: float | None = None
        self._pace = Pace(0, 0.0)
        #: Reads the progress of the process. It stays the same where the process can't be observed.
        self._read_pace: Callable[[], Pace] = lambda: Pace(0, 0.0)
        self.last_heard_s = self._loop.time()

    @property
    @abstractmethod
    def pid(self) -> int | None:
        """The id of the process on its machine; None before it was started."""

    @property
    def is_open(self) -> bool:
        """Whether a process was ever started at the other end. Only then is a death reported."""
        return self._transport is not None

    @abstractmethod
    async def open(self, start_frame: bytes) -> None:
        """Start the process and send it its options. Raises OSError if it can't be started. When
        this raises or is cancelled, no process is left."""

    @abstractmethod
    def kill(self, why: str) -> None:
        """Kill the process. The owner is notified when the process is gone, at the latest after
        UNDEAD_S: subclasses set the timer `_undead`, which calls `_abort_connection`."""

    def _abort_connection(self) -> None:
        """Treat the process as gone."""
        self._is_aborted = True
        if self._transport is not None:
            self._transport.abort()

    @abstractmethod
    async def _await_exit(self) -> tuple[QuireError, Death]:
        """Wait after the connection's end until the process is gone, and kill it if necessary.
        Returns the (error, death) of `LinkOwner.on_death`."""

    def send(self, frame: Frame) -> None:
        """Send encoded messages, in order. Has no effect once the process is gone."""
        if self._transport is not None:
            self._outgoing.send(self._transport, frame)

    def ask(self, question: Question) -> asyncio.Future[dict[str, Any]]:
        """The answer to a question, given between two steps. Fails with EngineDeadError if the
        process dies."""
        waiter: asyncio.Future[dict[str, Any]] = self._loop.create_future()
        self._waiters.append(waiter)
        self.send(encode(question))
        return waiter

    def call_between_steps(self, call: Callable[[], None]) -> None:
        """See `connected_replicas.Wire`."""

        def on_answer(answer: asyncio.Future[dict[str, Any]]) -> None:
            if not answer.cancelled() and answer.exception() is None:
                call()

        self.ask(Ping()).add_done_callback(on_answer)

    def watch(self, timeout_s: float | None) -> None:
        """From now on, kill the process if it sends no answer and makes no progress for
        `timeout_s`. None: for a time that depends on its step; see `step_limit_s`."""
        # First, read the process's progress, and set the timer for the next check.
        pulse_s = (timeout_s or LEAST_STEP_LIMIT_S) / _PULSES_PER_TIMEOUT
        now_s, pulse = self._loop.time(), self._pulse
        self._pulse = self._loop.call_later(pulse_s, self.watch, timeout_s)
        last, self._pace = self._pace, self._read_pace()
        limit_s = step_limit_s(self._pace.predicted_s) if timeout_s is None else timeout_s
        # Then send a ping, or judge how long one has not been answered.
        if pulse is not None and now_s > pulse.when() + pulse_s:
            # This process itself was suspended, so an answer may be unread.
            self._silent_since_s = None
        if self._silent_since_s is None:
            self._silent_since_s = now_s
            self.call_between_steps(self._record_pulse)
        elif self._pace.num_records != last.num_records:
            self._silent_since_s = now_s  # many messages come before the ping
        elif now_s - self._silent_since_s >= limit_s:
            self._has_hung = True
            self.kill(
                f"its step had not ended after {limit_s:.3g} s, so it was killed"
                " (heartbeat_timeout_s says how long a step may take)"
            )

    def _record_pulse(self) -> None:
        self._silent_since_s = None

    async def wait_dead(self) -> None:
        """Wait until the process is gone and the owner was notified."""
        await self._dead.wait()

    async def close(self) -> None:
        """End the process and wait for its end. May be called twice."""
        if self._transport is not None:
            self.kill("it was shut down")
            self._transport.close()
            await asyncio.shield(self._dead.wait())

    # ---- asyncio.Protocol -------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # Not checked by isinstance, since transports of other loops (uvloop) have other classes.
        self._transport = cast(asyncio.WriteTransport, transport)

    def data_received(self, data: bytes) -> None:
        self.last_heard_s = self._loop.time()
        try:
            for body in self._splitter.feed(data):
                self._receive(decode_to_server(body))
        except MessageError as error:
            self._fatal = Fatal(error.code, str(error))
            self.kill("it sent bytes that are no message")
            assert self._transport is not None
            self._transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        self._reaper = self._loop.create_task(self._handle_exit())

    def _receive(self, message: ToServer) -> None:
        match message:
            case Outputs() | RequestFailed():
                self._listener.on_message(self, message)
            case (
                StatsReply(answer)
                | MemoryReply(answer)
                | BlocksReply(answer)
                | ObserveReply(answer)
            ):
                self._answer(answer)
            case Pong():
                self._answer({})
            case AdapterReply():
                self.adapters.resolve(message)
            case Progress():
                self._owner.on_progress(self, message)
            case Ready():
                self._owner.on_ready(self, message)
            case Fatal():
                self._fatal = message

    def _answer(self, answer: dict[str, Any]) -> None:
        waiter = self._waiters.popleft()
        if not waiter.done():  # else the caller was cancelled or timed out
            waiter.set_result(answer)

    async def _handle_exit(self) -> None:
        for timer in (self._pulse, self._undead):
            if timer is not None:
                timer.cancel()
        error, death = await self._await_exit()
        _fail(self._waiters)
        _fail(self.adapters.waiters.values())
        self._waiters.clear()
        self._dead.set()
        self._owner.on_death(self, error, death)


OpenLink: TypeAlias = Callable[[LinkOwner, OutputListener], EngineLink]
"""Makes a link that is not open yet."""
