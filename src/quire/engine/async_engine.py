"""The front's side of the engine process: the only file where asyncio meets the loop.

`AsyncEngine.start` spawns `engine_process` and waits until it stands; `generate` opens a stream of
outputs; closing a stream aborts what is left of it. When the process dies every open stream ends
with EngineDeadError, and whatever way the front ends, no process stays behind.

Knows no HTTP, no text and no torch. Called by `server`.
"""

import asyncio
import contextlib
import logging
import signal
import socket
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from quire.core.request import Request, SequenceOutput
from quire.core.sampling_params import ModelLimits
from quire.engine.messages import (
    AbortRequest,
    AddRequest,
    BlocksReply,
    Fatal,
    FrameSplitter,
    GetStats,
    MemoryReply,
    MessageError,
    Outputs,
    Question,
    Ready,
    RequestFailed,
    Shutdown,
    Start,
    StatsReply,
    ToFront,
    decode_to_front,
    encode,
    error_from,
    start_error_from,
)
from quire.errors import EngineDeadError, InvalidRequestError, OverloadedError, QuireError
from quire.observability.log import get_logger

ENGINE_COMMAND = (sys.executable, "-m", "quire.engine.engine_process")
DEFAULT_MAX_QUEUED_REQUESTS = 1024

_REAP_TIMEOUT_S = 2.0

logger = get_logger(__name__)


def _log_level() -> str:
    """The front's own level, so that the engine's lines appear beside its own."""
    number = logging.getLogger("quire").getEffectiveLevel()
    names = {logging.DEBUG: "debug", logging.INFO: "info", logging.WARNING: "warning"}
    return next((name for bound, name in names.items() if number <= bound), "error")


class RequestStream:
    """The outputs of one or more requests, as they come. Use it with `async with`.

    Ends when every branch of every request has finished. Raises what ended a request early: its own
    error, or EngineDeadError. Invariant: outputs come in the order in which the engine made them.
    """

    def __init__(self, engine: "AsyncEngine", requests: Sequence[Request]) -> None:
        self._engine = engine
        self._open = {(r.request_id, branch) for r in requests for branch in range(r.n)}
        self._outputs: deque[SequenceOutput] = deque()
        self._error: QuireError | None = None
        self._news = asyncio.Event()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> SequenceOutput:
        while not self._outputs:
            if self._error is not None:
                raise self._error
            if not self._open:
                raise StopAsyncIteration
            self._news.clear()
            await self._news.wait()
        return self._outputs.popleft()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def num_open(self) -> int:
        """Branches that still run."""
        return len(self._open)

    @property
    def open_request_ids(self) -> set[str]:
        """Requests of which a branch still runs."""
        return {request_id for request_id, _ in self._open}

    def abort_branch(self, request_id: str, branch_index: int) -> None:
        """End one branch; no more of its outputs come. Nothing happens if it has ended."""
        if (request_id, branch_index) in self._open:
            self._engine.abort(request_id, branch_index)

    def close(self) -> None:
        """Abort whatever is still running. May be called twice."""
        for request_id in self.open_request_ids:
            self._engine.abort(request_id)
        self._outputs.clear()

    def push(self, output: SequenceOutput) -> None:
        """For AsyncEngine: an output of one of the requests. Of an ended branch it is dropped."""
        key = (output.request_id, output.branch_index)
        if key not in self._open:
            return
        if output.finish_reason is not None:
            self._open.discard(key)
        self._outputs.append(output)
        self._news.set()

    def forget(self, request_id: str, branch_index: int | None) -> None:
        """For AsyncEngine: the branch, or all branches, of a request were aborted."""
        ended = {
            key for key in self._open if key[0] == request_id and branch_index in (None, key[1])
        }
        self._open -= ended
        self._news.set()

    def fail(self, error: QuireError) -> None:
        """For AsyncEngine: end the stream with `error`, after the outputs that have come."""
        self._error = error
        self._news.set()


class _Connection(asyncio.Protocol):
    """Turns the socket's bytes into calls of `AsyncEngine`."""

    def __init__(self, engine: "AsyncEngine") -> None:
        self._engine = engine
        self._splitter = FrameSplitter()
        self._transport: asyncio.BaseTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        try:
            for body in self._splitter.feed(data):
                self._engine.on_message(decode_to_front(body))
        except MessageError as error:
            self._engine.on_message(Fatal(error.code, str(error)))
            if self._transport is not None:
                self._transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        self._engine.on_connection_lost()


class AsyncEngine:
    """One engine process and the streams that are open on it. Belongs to one event loop.

    Invariant: a request is in `_streams` exactly while outputs for it may come and be wanted.
    """

    def __init__(self, process: asyncio.subprocess.Process, max_queued_requests: int) -> None:
        """Use `start`."""
        self._process = process
        self._max_queued_requests = max_queued_requests
        self._streams: dict[str, RequestStream] = {}
        self._waiters: deque[asyncio.Future[dict[str, Any]]] = deque()
        self._ready: asyncio.Future[ModelLimits] = asyncio.get_running_loop().create_future()
        self._transport: asyncio.WriteTransport | None = None
        self._fatal: Fatal | None = None
        self._is_closing = False
        self._dead = asyncio.Event()
        self._reaper: asyncio.Task[None] | None = None
        self._limits: ModelLimits | None = None

    @classmethod
    async def start(
        cls,
        options: Mapping[str, object],
        *,
        max_queued_requests: int = DEFAULT_MAX_QUEUED_REQUESTS,
        command: Sequence[str] = ENGINE_COMMAND,
    ) -> "AsyncEngine":
        """Spawn the engine process and wait until it is ready for requests.

        options: of `engine.build.build_engine`; numbers, strings, booleans, None, and lists and
            dicts of them.
        max_queued_requests: how many requests may be open, waiting or running; one that asks for n
            samples counts n times.
        command: what to run; `--fd N --log-level L` is appended.

        Raises what `build_engine` raised (ConfigurationError and its kin), EngineDeadError if the
        process ended without a word, and MessageError for options that can't be sent. When it
        raises, or is cancelled, the process is gone.
        """
        start_message = encode(Start(dict(options)))
        ours, theirs = socket.socketpair()
        with theirs, contextlib.ExitStack() as undo:
            undo.callback(ours.close)
            process = await asyncio.create_subprocess_exec(
                *command,
                *("--fd", str(theirs.fileno()), "--log-level", _log_level()),
                pass_fds=(theirs.fileno(),),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=sys.__stderr__.fileno() if sys.__stderr__ else None,
                process_group=0,  # a terminal's Ctrl-C is for the front to understand
            )
            undo.pop_all()
        engine = cls(process, max_queued_requests)
        try:
            await engine._connect(ours, start_message)
        except BaseException:
            await engine._kill()
            raise
        return engine

    async def _connect(self, sock: socket.socket, start_message: bytes) -> None:
        transport, _ = await asyncio.get_running_loop().create_unix_connection(
            lambda: _Connection(self), sock=sock
        )
        self._transport = transport
        transport.write(start_message)
        self._limits = await self._ready

    @property
    def limits(self) -> ModelLimits:
        """What the engine was built for."""
        assert self._limits is not None, "the engine was never ready"
        return self._limits

    @property
    def is_alive(self) -> bool:
        """Whether the engine takes requests."""
        return not self._is_closing and not self._dead.is_set() and self._fatal is None

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def num_open(self) -> int:
        """Branches of requests whose end has not come yet."""
        return sum(stream.num_open for stream in set(self._streams.values()))

    def generate(self, *requests: Request) -> RequestStream:
        """Send requests to the engine and open one stream for their outputs.

        Raises OverloadedError when they don't all fit among the open requests, EngineDeadError,
        InvalidRequestError for an id that is in use. The engine's own refusals are raised by the
        stream.
        """
        self._check_alive()
        self._check_room(sum(request.n for request in requests))
        ids = {request.request_id for request in requests}
        if len(ids) < len(requests) or ids & self._streams.keys():
            raise InvalidRequestError("request ids must be unique", "request_id")
        try:
            frames = [encode(AddRequest(request)) for request in requests]
        except MessageError as error:
            raise InvalidRequestError(str(error)) from error
        stream = RequestStream(self, requests)
        self._streams |= dict.fromkeys(ids, stream)
        for frame in frames:
            self._send(frame)
        return stream

    def _check_room(self, num_wanted: int) -> None:
        bound, num_open = self._max_queued_requests, self.num_open
        if num_wanted > bound:
            raise InvalidRequestError(
                f"{num_wanted} generations at once (prompts times n), above the bound of {bound}; "
                "send them in several calls"
            )
        if num_open + num_wanted > bound:
            raise OverloadedError(
                f"{num_open} generations are open and {num_wanted} more would exceed the bound of "
                f"{bound}; retry later"
            )

    def abort(self, request_id: str, branch_index: int | None = None) -> None:
        """End a request, or one branch of it, before the engine's next step.

        Its stream goes on without it. Nothing happens for an id that is not open.
        """
        stream = self._streams.get(request_id)
        if stream is None:
            return
        stream.forget(request_id, branch_index)
        if request_id not in stream.open_request_ids:
            del self._streams[request_id]
        self._send(encode(AbortRequest(request_id, branch_index)))

    async def stats(self, timeout_s: float = 10.0) -> dict[str, Any]:
        """The engine's EngineStats by field name; otherwise as `ask`."""
        return await self.ask(GetStats(), timeout_s)

    async def ask(self, question: Question, timeout_s: float = 10.0) -> dict[str, Any]:
        """The engine's answer, from between two steps: what the reply to the question carries.

        Raises EngineDeadError, also when no answer comes within timeout_s: then no step has ended
        for so long.
        """
        self._check_alive()
        waiter: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        self._send(encode(question))
        try:
            return await asyncio.wait_for(waiter, timeout_s)
        except TimeoutError as error:
            raise EngineDeadError(
                f"the engine has not answered for {timeout_s:g} s: no step has ended meanwhile"
            ) from error

    async def shutdown(self, *, drain: bool = True, timeout_s: float = 30.0) -> None:
        """End the process: after its open requests (drain), or at once; by force after timeout_s.

        When it returns, or is cancelled, the process is gone. May be called twice.
        """
        self._is_closing = True
        self._send(encode(Shutdown(drain)))
        try:
            await asyncio.wait_for(self._dead.wait(), timeout_s)
        except TimeoutError:
            pass  # the process had its time; `finally` ends it
        finally:
            await self._kill()

    def on_message(self, message: ToFront) -> None:
        """For the connection: one message from the engine."""
        match message:
            case Outputs(outputs):
                for output in outputs:
                    self._push(output)
            case RequestFailed(request_id):
                stream = self._streams.pop(request_id, None)
                if stream is not None:
                    stream.forget(request_id, None)
                    stream.fail(error_from(message))
            case StatsReply(answer) | MemoryReply(answer) | BlocksReply(answer):
                waiter = self._waiters.popleft()
                if not waiter.done():
                    waiter.set_result(answer)
            case Ready(limits):
                if not self._ready.done():
                    self._ready.set_result(limits)
            case Fatal():
                self._fatal = message

    def _push(self, output: SequenceOutput) -> None:
        stream = self._streams.get(output.request_id)
        if stream is None:
            return  # aborted while this output was under way
        stream.push(output)
        if output.finish_reason is not None and output.request_id not in stream.open_request_ids:
            del self._streams[output.request_id]

    def on_connection_lost(self) -> None:
        """For the connection: the engine's end is closed, so the process is ending or gone."""
        if self._reaper is None:
            self._reaper = asyncio.get_running_loop().create_task(self._reap())

    async def _reap(self) -> None:
        """Wait for the process, by force if need be, then fail whatever still waits for it."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), _REAP_TIMEOUT_S)
        if self._process.returncode is None:
            self._process.kill()
            await self._process.wait()
        self._dead.set()
        error = _death(self._fatal, self._is_closing, self._process.returncode or 0)
        if not self._is_closing:
            logger.error("%s", error)
        for stream in set(self._streams.values()):
            stream.fail(error)
        self._streams.clear()
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_exception(error)
        if not self._ready.done():
            self._ready.set_exception(error)

    async def _kill(self) -> None:
        """Leave no process behind. Waits for its end."""
        self._is_closing = True
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
        if self._transport is not None:
            self._transport.close()
            await asyncio.shield(self._dead.wait())
        else:
            await self._process.wait()

    def _check_alive(self) -> None:
        if not self.is_alive:
            raise EngineDeadError("the engine is not running, so it takes no requests")

    def _send(self, frame: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(frame)


def _death(fatal: Fatal | None, is_closing: bool, status: int) -> QuireError:
    """Why the process ended, with exit status `status`."""
    if fatal is not None:
        return start_error_from(fatal)
    if is_closing:
        return EngineDeadError("the engine was shut down before the request had finished")
    how = f"with exit code {status}"
    if status < 0:
        how = f"by signal {-status} ({signal.Signals(-status).name})"
    return EngineDeadError(f"the engine process has ended {how}; restart the server")
