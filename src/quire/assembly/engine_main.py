"""The engine behind a socket: `python -m quire.assembly.engine_main --fd N --activity-fd M`.

The front starts this process with one end of a socket pair as descriptor N, and as descriptor M
the memory in which the process says what it is doing (see `activity`). The first message brings the
options; then the loop reads what has come, takes one step, sends what it brought, and sleeps in
`poll` only while there is no work. So an abort frees its blocks before the next step, and a hundred
new requests enter one step together. Of more than TAKE_IN_S takes the rest waits for the step's
end, so that a call with hundreds of prompts holds up no stream.

The process ends by itself when the front is gone, whatever it is doing: the loop sees the end of
the stream, and a watching thread covers the times when the loop is not looking (loading a model, a
long step). A front that does not read stops the steps, not the listening.

Knows no text, no HTTP and no asyncio. Started by `link`.
"""

import argparse
import dataclasses
import gc
import math
import os
import select
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any, Protocol, TypeAlias

from quire.assembly.address_space import named_memory_failures
from quire.core.memory.block_map import BlockMap
from quire.core.memory.memory_report import MemoryReport
from quire.core.request import Request, SequenceOutput
from quire.core.sampling_params import ModelLimits
from quire.engine.step_watcher import StepWatcher
from quire.engine_client.activity import ActivityRecord
from quire.engine_client.block_page import block_page
from quire.engine_client.logprob_entries import pack
from quire.engine_client.messages import (
    AbortRequest,
    AddRequest,
    BlocksReply,
    Fatal,
    FrameSplitter,
    GetBlocks,
    GetMemory,
    GetStats,
    MemoryReply,
    MessageError,
    Outputs,
    Ping,
    Pong,
    Progress,
    Question,
    Ready,
    Reply,
    RequestFailed,
    Shutdown,
    Start,
    StatsReply,
    ToEngine,
    ToFront,
    decode_to_engine,
    encode,
    request_failed,
)
from quire.errors import EngineDeadError, QuireError
from quire.observability import log

MAX_BACKLOG_BYTES = 16 << 20
"""With so much unsent, the loop takes no step until the front has read some of it."""

TAKE_IN_S = 0.005
"""While sequences run, so long at most is spent between two steps on what has come: one call may be
hundreds of requests."""

FRONT_GONE_GRACE_S = 1.0
"""How long the loop has to notice by itself that the front is gone, before the watcher ends it."""

_RECEIVE_BYTES = 1 << 20

_logger = log.get_logger("quire.assembly.engine_main")  # __name__ is "__main__" here


class EngineLike(Protocol):
    """What the loop needs of an engine; `engine.Engine` is one."""

    step_watcher: StepWatcher | None

    @property
    def limits(self) -> ModelLimits: ...

    @property
    def facts(self) -> Mapping[str, Any]: ...

    def add(self, request: Request) -> None: ...

    def abort(self, request_id: str, branch_index: int | None = None) -> None: ...

    def step(self) -> list[SequenceOutput]: ...

    def has_work(self) -> bool: ...

    def stats(self) -> Any: ...

    def memory_report(self) -> MemoryReport: ...

    def block_map(self, first_block: int, max_num_blocks: int | None) -> BlockMap: ...


OnProgress: TypeAlias = Callable[[str, int, int], None]
"""Called while the engine is built: with what is done, how much of it, of how much (0: unknown)."""

Build: TypeAlias = Callable[[Mapping[str, object], OnProgress], EngineLike]


class FrontGoneError(Exception):
    """The other end of the socket is closed: the process has nobody left to work for."""


class Channel:
    """Messages over a non-blocking socket. Owns the socket.

    Invariant: `send` never waits; what the socket does not take stays in the backlog, in order.
    """

    def __init__(self, sock: socket.socket, wakeup: socket.socket | None = None) -> None:
        """wakeup: becomes readable when `receive` shall return early (a signal came)."""
        sock.setblocking(False)
        self._sock = sock
        self._wakeup = wakeup
        self._splitter = FrameSplitter()
        self._backlog = bytearray()
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        if wakeup is not None:
            self._poll.register(wakeup, select.POLLIN)

    @property
    def num_backlog_bytes(self) -> int:
        return len(self._backlog)

    def send(self, message: ToFront) -> None:
        """Queue a message and send what the socket takes now.

        Raises FrontGoneError, and MessageError for a message that is too long.
        """
        self._backlog += encode(message)
        self._flush()

    def receive(self, timeout_s: float | None) -> list[ToEngine]:
        """All messages that have come. With none, waits up to timeout_s (None: until something
        happens). Sends from the backlog meanwhile. Raises FrontGoneError, MessageError.
        """
        interest = select.POLLIN | select.POLLOUT if self._backlog else select.POLLIN
        events = self._wait(interest, timeout_s)
        if self._wakeup is not None and self._wakeup.fileno() in events:
            self._wakeup.recv(4096)
        state = events.get(self._sock.fileno(), 0)
        if state & select.POLLOUT:
            self._flush()
        return self._read() if state & ~select.POLLOUT else []

    def drain_backlog(self, timeout_s: float) -> None:
        """Send the whole backlog, or as much as the front takes within timeout_s."""
        deadline_s = time.monotonic() + timeout_s
        while self._backlog and (left_s := deadline_s - time.monotonic()) > 0:
            state = self._wait(select.POLLOUT, left_s).get(self._sock.fileno(), 0)
            if state & (select.POLLHUP | select.POLLERR):
                raise FrontGoneError("hang-up")
            if state & select.POLLOUT:
                self._flush()

    def _wait(self, interest: int, timeout_s: float | None) -> dict[int, int]:
        """Descriptor -> poll events of what happened, empty when the time was up."""
        self._poll.modify(self._sock, interest)
        timeout_ms = None if timeout_s is None else math.ceil(timeout_s * 1000)
        return dict(self._poll.poll(timeout_ms))

    def _flush(self) -> None:
        try:
            while self._backlog:
                with memoryview(self._backlog) as view:
                    num_sent = self._sock.send(view)
                del self._backlog[:num_sent]
        except BlockingIOError:
            return
        except OSError as error:
            raise FrontGoneError(str(error)) from error

    def _read(self) -> list[ToEngine]:
        bodies: list[bytes] = []
        try:
            while data := self._sock.recv(_RECEIVE_BYTES):
                bodies += self._splitter.feed(data)
                if len(data) < _RECEIVE_BYTES:
                    return [decode_to_engine(body) for body in bodies]
        except BlockingIOError:
            return [decode_to_engine(body) for body in bodies]
        except OSError as error:
            raise FrontGoneError(str(error)) from error
        raise FrontGoneError("end of stream")


class EngineLoop:
    """Reads, steps, answers, until it is told to end or the front is gone.

    Invariant: each request that came before it drained is answered by outputs up to its end or by
    RequestFailed.
    """

    def __init__(
        self,
        engine: EngineLike,
        channel: Channel,
        record: ActivityRecord | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """record: where it is written what is being done; None for nowhere that anybody reads.
        clock: in seconds."""
        self._engine = engine
        self._channel = channel
        self._clock = clock
        self._inbox: deque[ToEngine] = deque()  # has come, in order, and was not taken in yet
        self._record = record or ActivityRecord()
        engine.step_watcher = StepWatcher(self._record.compute)
        self._is_draining = False
        self._is_ending = False

    def drain(self) -> None:
        """Take no more requests and end after the open ones. Safe in a signal handler."""
        self._is_draining = True

    def run(self) -> None:
        """Serve until the end. Raises FrontGoneError, or what the engine raised."""
        self._channel.send(Ready(self._engine.limits, dict(self._engine.facts)))
        while True:
            is_clogged = self._channel.num_backlog_bytes > MAX_BACKLOG_BYTES
            can_step = self._engine.has_work() and not is_clogged
            if not can_step and not self._inbox:
                if self._is_draining and not self._engine.has_work():
                    return
                self._record.idle()
            may_wait = not (can_step or self._inbox)
            self._inbox.extend(self._channel.receive(None if may_wait else 0.0))
            self._take_in(TAKE_IN_S if can_step else math.inf)
            if self._is_ending:
                return
            if can_step and self._engine.has_work():
                self._record.plan()
                self._send_outputs(self._engine.step())

    def _take_in(self, seconds: float) -> None:
        """Handle what has come: all of it, or as much as takes so long. At least one message."""
        end_s = self._clock() + seconds
        while self._inbox and not self._is_ending:
            self._handle(self._inbox.popleft())
            if self._clock() >= end_s:
                return

    def _handle(self, message: ToEngine) -> None:
        match message:
            case AddRequest(request):
                self._record.take_in(request.request_id)
                self._add(request)
            case AbortRequest(request_id, branch_index):
                self._record.take_in(request_id)
                self._engine.abort(request_id, branch_index)
            case Ping() | GetStats() | GetMemory() | GetBlocks():
                self._channel.send(self._reply(message))
            case Shutdown(drain):
                self._is_draining = True
                self._is_ending = not drain
            case Start():
                raise MessageError("the front sent its options twice")

    def _reply(self, question: Question) -> Reply:
        match question:
            case Ping():
                return Pong()
            case GetStats():
                return StatsReply(dataclasses.asdict(self._engine.stats()))
            case GetMemory():
                return MemoryReply(self._engine.memory_report().as_dict())
            case GetBlocks(first_block, max_num_blocks):
                return BlocksReply(block_page(self._engine.block_map(first_block, max_num_blocks)))

    def _add(self, request: Request) -> None:
        if self._is_draining:
            return  # the front sends it again, to the next process
        try:
            self._engine.add(request)
        except QuireError as error:
            self._channel.send(request_failed(request.request_id, error))

    def _send_outputs(self, outputs: Sequence[SequenceOutput]) -> None:
        if not outputs:
            return
        try:
            self._channel.send(Outputs([_packed(output) for output in outputs]))
        except MessageError as error:
            self._send_one_by_one(outputs, error)

    def _send_one_by_one(self, outputs: Sequence[SequenceOutput], error: MessageError) -> None:
        if len(outputs) > 1:
            for output in outputs:
                self._send_outputs([output])
            return
        request_id = outputs[0].request_id
        self._engine.abort(request_id)
        self._channel.send(RequestFailed(request_id, error.code, str(error), error.http_status))


def _packed(output: SequenceOutput) -> SequenceOutput:
    """The same with the log-probabilities of its prompt, maybe megabytes, in a form that the front
    need not decode at once."""
    entries = output.prompt_logprobs
    if entries is None or isinstance(entries, bytes):
        return output
    return output._replace(prompt_logprobs=pack(entries))


def serve_front(
    sock: socket.socket,
    build: Build,
    wakeup: socket.socket | None = None,
    on_ready: Callable[[EngineLoop], None] | None = None,
    record: ActivityRecord | None = None,
) -> int:
    """Receive the options, build the engine, serve. Returns the process's exit code.

    on_ready: called with the loop once the engine stands (to connect signals with it). record: see
    `EngineLoop`.
    """
    channel = Channel(sock, wakeup)
    try:
        engine = _build(build, channel)
        loop = EngineLoop(engine, channel, record)
        if on_ready is not None:
            on_ready(loop)
        loop.run()
        channel.drain_backlog(FRONT_GONE_GRACE_S)
    except FrontGoneError:
        return 0
    except EngineDeadError as error:
        return _report(channel, Fatal(error.code, str(error), error.rank_status))
    except QuireError as error:
        return _report(channel, Fatal(error.code, str(error)))
    except Exception as error:
        # The last line of defence: the process ends either way, and the front is told why.
        _logger.exception("the engine's process ends with an error")
        return _report(channel, Fatal(QuireError.code, f"{type(error).__name__}: {error}"))
    return 0


def _build(build: Build, channel: Channel) -> EngineLike:
    def tell(text: str, done: int, total: int) -> None:
        channel.send(Progress(text, done, total))

    return build(_receive_options(channel), tell)


def _receive_options(channel: Channel) -> Mapping[str, object]:
    while True:
        messages = channel.receive(None)
        if not messages:
            continue
        if len(messages) != 1 or not isinstance(messages[0], Start):
            raise MessageError("the front's first message must be its options, and nothing else")
        return messages[0].options


def _report(channel: Channel, fatal: Fatal) -> int:
    try:
        channel.send(fatal)
        channel.drain_backlog(FRONT_GONE_GRACE_S)
    except FrontGoneError:
        _logger.error("%s", fatal.message)
    return 1


def watch_front(sock: socket.socket) -> threading.Thread:
    """A daemon thread that ends the process soon after the other end of `sock` was closed."""

    def watch() -> None:
        poll = select.poll()
        poll.register(sock.fileno(), 0)  # no events asked for: only hang-up and errors are told
        poll.poll()
        time.sleep(FRONT_GONE_GRACE_S)
        os._exit(1)

    thread = threading.Thread(target=watch, name="quire-watch-front", daemon=True)
    thread.start()
    return thread


def main(
    argv: Sequence[str] | None = None,
    build: Build | None = None,
) -> int:
    """Run the process. build: makes the engine; `engine.build.build_engine` by default."""
    # Where a Ctrl-C reaches this process, too, the front alone decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parser = argparse.ArgumentParser(prog="quire.assembly.engine_main")
    parser.add_argument("--fd", type=int, required=True, help="the inherited end of a socket pair")
    parser.add_argument("--activity-fd", type=int, help="inherited; see engine.activity")
    parser.add_argument("--log-level", default="warning")
    parser.add_argument("--log-format", default="text")
    arguments = parser.parse_args(argv)
    log.configure(arguments.log_level, arguments.log_format)
    sock = socket.socket(fileno=arguments.fd)
    watch_front(sock)
    record = ActivityRecord(arguments.activity_fd)
    if arguments.activity_fd is not None:
        os.close(arguments.activity_fd)
    wakeup, signalled = socket.socketpair()
    for end in (wakeup, signalled):
        end.setblocking(False)
    signal.set_wakeup_fd(signalled.fileno(), warn_on_full_buffer=False)

    def drain_on_sigterm(loop: EngineLoop) -> None:
        def on_sigterm(_signum: int, _frame: FrameType | None) -> None:
            loop.drain()

        signal.signal(signal.SIGTERM, on_sigterm)

    return serve_front(sock, build or _build_engine, wakeup, drain_on_sigterm, record)


def _build_engine(options: Mapping[str, object], on_progress: OnProgress) -> EngineLike:
    with named_memory_failures():
        # Imported here: it brings torch, which the watcher above must not wait for.
        from quire.assembly.build import build_engine

    engine = build_engine(options, on_progress)
    # What stands now stays. Python would look through all of it now and then in search of garbage,
    # which takes 0.1 s where torch is loaded, in the middle of a step.
    gc.collect()
    gc.freeze()
    return engine


if __name__ == "__main__":
    sys.exit(main())
