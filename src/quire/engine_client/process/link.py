"""Messages to one engine and from it, from its start to its end.

A link lives as long as its engine's process: what dies is not started again here. It sends what it
is given, answers questions in their order, ends a process that hangs, hands outputs to its listener
and everything else to its owner. Where the process is, and how it is started and ended, is a
subclass's affair: `process_link` has one of this machine, `fleet.remote_link` one of another.

Knows no requests and no streams. Made by `supervisor`.
"""

import asyncio
import secrets
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable
from itertools import count
from typing import Any, Protocol, TypeAlias, cast

from quire.core.adapters import AdapterRef
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
)
from quire.engine_client.recovery import Death
from quire.errors import EngineDeadError, QuireError
from quire.ipc import FrameSplitter, MessageError, encode

_PULSES_PER_TIMEOUT = 4
_FIRST_ID_BITS = 48

UNDEAD_S = 20.0
"""A process that was killed and has not ended after so long is given up: what waits in the kernel,
for a file server or a driver, can't be ended. Giving much memory back takes seconds."""


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
        # Behind an agent a process outlives its links, and may still answer an earlier one.
        self._ids = count(secrets.randbits(_FIRST_ID_BITS))
        self._send = send

    def find(self, name: str, path: str, anew: bool) -> "asyncio.Future[AdapterRef]":
        """The adapter in a folder, once it was read. Fails with AdapterError, InvalidRequestError,
        and with EngineDeadError if the process dies."""
        find_id = next(self._ids)
        self.waiters[find_id] = waiter = asyncio.get_running_loop().create_future()
        self._send(encode(FindAdapter(find_id, name, path, anew)))
        return waiter

    def take(self, reply: AdapterReply) -> None:
        """An answer has come, if it is one of these questions'."""
        waiter = self.waiters.pop(reply.find_id, None)
        if waiter is None or waiter.done():  # the caller was cancelled
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
    """Invariant: `on_death` is called exactly once for a link that was opened, and last; at most
    some seconds after UNDEAD_S from a `kill` on, whatever has become of the process."""

    def __init__(self, owner: LinkOwner, listener: OutputListener) -> None:
        """Starts nothing; `open` does."""
        self._owner = owner
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.WriteTransport | None = None
        self._splitter = FrameSplitter()
        self._waiters: deque[asyncio.Future[dict[str, Any]]] = deque()
        self.adapters = AdapterCalls(self.send)
        self._fatal: Fatal | None = None
        self._killed_because: str | None = None
        self._has_hung = False
        self._reaper: asyncio.Task[None] | None = None
        self._undead: asyncio.TimerHandle | None = None
        self._is_given_up = False
        self._dead = asyncio.Event()
        self._pulse: asyncio.TimerHandle | None = None
        self._asked_s: float | None = None  # since when an answer of the heartbeat is due
        self.last_heard_s = self._loop.time()

    @property
    @abstractmethod
    def pid(self) -> int | None:
        """Of the process, on its machine; None before it was started."""

    @property
    def is_open(self) -> bool:
        """Whether there is, or was, a process at the other end, whose death is reported."""
        return self._transport is not None

    @abstractmethod
    async def open(self, start_frame: bytes) -> None:
        """Start the process and send it its options. Raises OSError where it can't be started. No
        process is left when this raises, or is cancelled."""

    @abstractmethod
    def kill(self, why: str) -> None:
        """End the process at once; the owner is called when it is gone, or `_give_up`, after
        UNDEAD_S: subclasses set `_undead`."""

    def _give_up(self) -> None:
        """As if the process had closed its end."""
        self._is_given_up = True
        if self._transport is not None:
            self._transport.abort()

    @abstractmethod
    async def _bury(self) -> tuple[QuireError, Death]:
        """The connection is closed: wait until the process is gone, by force if need be. Returns
        why it has ended, for people, and the evidence."""

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
        for timer in (self._pulse, self._undead):
            if timer is not None:
                timer.cancel()
        error, death = await self._bury()
        _fail(self._waiters)
        _fail(self.adapters.waiters.values())
        self._waiters.clear()
        self._dead.set()
        self._owner.on_death(self, error, death)


OpenLink: TypeAlias = Callable[[LinkOwner, OutputListener], EngineLink]
"""Makes a link, which starts nothing yet."""
