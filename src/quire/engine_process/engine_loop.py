"""The main loop of the engine's process: reads messages, steps the engine, sends outputs.

The first message has the engine's options. Then the loop repeats: it reads all messages, takes one
step and sends the step's outputs. The loop sleeps in `poll` only while there is no work. So an
abort frees its blocks before the next step, and a hundred new requests enter one step together.
After MESSAGES_S the remaining messages wait until after the step, so that a call with hundreds of
prompts does not delay streams. If the API server does not read its outputs, the loop stops stepping
but still reads messages.

Independent of text, HTTP and asyncio. Called by `engine_main`.
"""

import dataclasses
import math
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import TypeAlias

from quire.core.adapters import AdapterRef
from quire.core.request import Request, SequenceOutput
from quire.engine.engine import Engine
from quire.engine.observation import Observation
from quire.engine_client.block_page import block_page
from quire.engine_client.logprob_entries import pack
from quire.engine_client.messages import (
    AbortAll,
    AbortRequest,
    AdapterReply,
    AddRequest,
    BlocksReply,
    ClearPrefixes,
    ContentValues,
    Fatal,
    FindAdapter,
    GetBlocks,
    GetMemory,
    GetStats,
    MemoryReply,
    Observe,
    ObserveReply,
    OnProgress,
    Outputs,
    Ping,
    Pong,
    Prepare,
    Progress,
    Question,
    Ready,
    Reply,
    RequestFailed,
    SetPaused,
    Shutdown,
    Start,
    StatsReply,
    ToEngine,
    ToServer,
    decode_to_engine,
    request_failed,
)
from quire.engine_client.process.activity import ActivityRecord
from quire.engine_process.process_setup import PEER_GONE_GRACE_S
from quire.errors import EngineDeadError, QuireError
from quire.ipc import FrameSplitter, MessageError, PeerGoneError, encode
from quire.observability.log import get_logger

MAX_BACKLOG_BYTES = 16 << 20
"""Maximum unsent bytes. With more, the loop takes no step until the API server has read some of
them."""

MESSAGES_S = 0.005
"""Maximum seconds for handling messages between two steps while sequences run, since one call may
bring hundreds of requests."""

FIND_POLL_S = 0.01
"""Seconds between checks whether a requested adapter has been read."""

_RECEIVE_BYTES = 1 << 20

_logger = get_logger("quire.engine_process.engine_main")  # named after the process

Build: TypeAlias = Callable[[Mapping[str, object], OnProgress], Engine]


class Channel:
    """Messages over a non-blocking socket. Owns the socket.

    Invariant: `send` never waits; bytes that the socket does not accept stay in the backlog.
    """

    def __init__(self, sock: socket.socket, wakeup: socket.socket | None = None) -> None:
        """`wakeup` becomes readable when `receive` must return early, because a signal came."""
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

    def send(self, message: ToServer) -> None:
        """Queue a message and send what the socket takes now.

        Raises PeerGoneError, and MessageError for a message that is too long.
        """
        self._backlog += encode(message)
        self._flush()

    def receive(self, timeout_s: float | None) -> list[ToEngine]:
        """Read all messages that have arrived. Waits at most `timeout_s` for a first message; None
        means no limit. While waiting, sends from the backlog. Raises PeerGoneError, MessageError.
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
        """Send the whole backlog, or as much as the API server reads within timeout_s."""
        deadline_s = time.monotonic() + timeout_s
        while self._backlog and (left_s := deadline_s - time.monotonic()) > 0:
            state = self._wait(select.POLLOUT, left_s).get(self._sock.fileno(), 0)
            if state & (select.POLLHUP | select.POLLERR):
                raise PeerGoneError("hang-up")
            if state & select.POLLOUT:
                self._flush()

    def _wait(self, interest: int, timeout_s: float | None) -> dict[int, int]:
        """The poll events by descriptor, empty after the timeout."""
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
            raise PeerGoneError(str(error)) from error

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
            raise PeerGoneError(str(error)) from error
        raise PeerGoneError("end of stream")


class ArrivingContents:
    """The contents of the request that is arriving, whose pieces come before the request."""

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        #: Values by digest.
        self._values: dict[str, bytes] = {}

    def add(self, piece: ContentValues) -> None:
        """Take a piece. The pieces of a content are joined when its last one has come."""
        self._pieces.append(piece.values)
        if piece.is_last:
            self._values[piece.digest] = b"".join(self._pieces)
            self._pieces = []

    def complete(self, request: Request) -> Request:
        """The request with the values that came before it."""
        values, self._values = self._values, {}
        if not values:
            return request
        contents = tuple(
            content._replace(values=values.get(content.digest, content.values))
            for content in request.contents
        )
        return dataclasses.replace(request, contents=contents)


class EngineLoop:
    """Reads messages, steps and sends outputs until a Shutdown or the socket's end.

    Invariant: for each request that came before `drain`, all outputs up to its end are sent, or a
    RequestFailed.
    """

    def __init__(
        self,
        engine: Engine,
        channel: Channel,
        record: ActivityRecord | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`record` shows the current activity to other processes; None means that no process sees
        it.

        `clock` returns seconds.
        """
        self._engine = engine
        self._observation = Observation(engine)
        self._channel = channel
        self._clock = clock
        self._inbox: deque[ToEngine] = deque()  # messages not handled yet, oldest first
        # Each unanswered FindAdapter message: its id, and the future of the adapter that is being
        # read.
        self._finding: list[tuple[int, Future[AdapterRef]]] = []
        self._contents = ArrivingContents()
        self._record = record or ActivityRecord()
        engine.on_step = self._record.compute
        self._is_draining = False
        self._is_ending = False
        self._is_paused = False
        self._idle_since_s: float | None = None

    def drain(self) -> None:
        """Take no more requests, and end when the open requests have ended. Safe in a signal
        handler."""
        self._is_draining = True
        self._is_paused = False

    def run(self) -> None:
        """Serve until the end. Raises PeerGoneError and the engine's errors."""
        self._channel.send(Ready(self._engine.limits, dict(self._engine.facts)))
        while True:
            # First, decide whether a step can follow, or how long to wait for messages.
            is_clogged = self._channel.num_backlog_bytes > MAX_BACKLOG_BYTES
            can_step = self._can_step() and not is_clogged
            if not can_step and not self._inbox:
                if self._is_draining and not self._engine.has_work():
                    return
                self._record.idle()
            may_wait = not (can_step or self._inbox)
            wait_s = self._idle_wait_s() if may_wait else 0.0
            if self._finding:
                self._send_found_adapters()
                wait_s = FIND_POLL_S if may_wait else 0.0
            # Then read and handle messages, which may add or remove work.
            self._inbox.extend(self._channel.receive(wait_s))
            self._handle_messages(MESSAGES_S if can_step else math.inf)
            if self._is_ending:
                return
            if can_step and self._can_step():
                self._idle_since_s = None
                self._record.plan()
                self._send_outputs(self._engine.step(launches=not self._is_paused))

    def _can_step(self) -> bool:
        """True if there is work for a step. During a pause, only steps already launched count."""
        return self._engine.has_work(launches=not self._is_paused)

    def _idle_wait_s(self) -> float | None:
        """Do background work of the tiers and the engine while there are no steps.

        Returns the seconds until background work is due again; None if only a message brings work.
        """
        wait_s = self._engine.tier_work.advance_idle()
        if self._engine.on_idle is None:
            return wait_s
        now_s = self._clock()
        self._idle_since_s = now_s if self._idle_since_s is None else self._idle_since_s
        due_s = self._engine.on_idle(now_s - self._idle_since_s)
        return min((each for each in (wait_s, due_s) if each is not None), default=None)

    def _handle_messages(self, seconds: float) -> None:
        """Handle received messages, at least one, until none is left or `seconds` have passed."""
        end_s = self._clock() + seconds
        while self._inbox and not self._is_ending:
            self._handle(self._inbox.popleft())
            if self._clock() >= end_s:
                return

    def _handle(self, message: ToEngine) -> None:
        match message:
            case ContentValues():
                self._contents.add(message)
            case AddRequest(request):
                self._record.record_request(request.request_id)
                self._add(self._contents.complete(request))
            case AbortRequest(request_id, branch_index):
                self._record.record_request(request_id)
                self._engine.abort(request_id, branch_index)
            case AbortAll():
                self._engine.abort(None)
            case FindAdapter(find_id, name, path, anew):
                self._find_adapter(find_id, name, path, anew)
            case SetPaused(paused):
                self._is_paused = paused
            case ClearPrefixes():
                self._engine.clear_prefixes()
            case Ping() | GetStats() | GetMemory() | GetBlocks() | Observe():
                self._channel.send(self._reply(message))
            case Shutdown(drain):
                self._is_draining = True
                self._is_ending = not drain
                self._is_paused = False  # so that open requests can end
            case Prepare() | Start():
                raise MessageError("the API server sent its options twice")

    def _find_adapter(self, find_id: int, name: str, path: str, anew: bool) -> None:
        try:
            self._finding.append((find_id, self._engine.adapters.find(name, path, anew=anew)))
        except QuireError as error:
            self._channel.send(AdapterReply(find_id, failure=request_failed("", error)))

    def _send_found_adapters(self) -> None:
        for each in [each for each in self._finding if each[1].done()]:
            self._finding.remove(each)
            find_id, future = each
            try:
                reply = AdapterReply(find_id, future.result())
            except QuireError as error:
                reply = AdapterReply(find_id, failure=request_failed("", error))
            self._channel.send(reply)

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
            case Observe(parts, since, table_of):
                return ObserveReply(self._observation.observe(parts, since, table_of))

    def _add(self, request: Request) -> None:
        if self._is_draining:
            return  # the API server sends the request to the next process
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
    """A copy of the output whose prompt log-probabilities are packed as bytes.

    They may take megabytes. As bytes, the API server can decode them later.
    """
    entries = output.prompt_logprobs
    if entries is None or isinstance(entries, bytes):
        return output
    return output._replace(prompt_logprobs=pack(entries))


def build_and_serve(
    sock: socket.socket,
    build: Build,
    wakeup: socket.socket | None = None,
    on_ready: Callable[[EngineLoop], None] | None = None,
    record: ActivityRecord | None = None,
    prepare: Callable[[], None] = lambda: None,
) -> int:
    """Receive the options, build the engine, and run its loop. Returns the process's exit code.

    `on_ready` is called with the loop when the engine is built, so that the caller can install
    signal handlers. `record` is as in `EngineLoop`. `prepare` loads libraries ahead of the options,
    if the API server asks for that.
    """
    channel = Channel(sock, wakeup)
    try:
        engine = _build(build, channel, prepare)
        loop = EngineLoop(engine, channel, record)
        if on_ready is not None:
            on_ready(loop)
        try:
            loop.run()
            channel.drain_backlog(PEER_GONE_GRACE_S)
        finally:
            engine.tier_work.close()
    except PeerGoneError:
        return 0
    except EngineDeadError as error:
        return _report(channel, Fatal(error.code, str(error), error.rank_status))
    except QuireError as error:
        return _report(channel, Fatal(error.code, str(error)))
    except Exception as error:
        # The process ends in any case, so tell the API server why.
        _logger.exception("the engine's process ends with an error")
        return _report(channel, Fatal(QuireError.code, f"{type(error).__name__}: {error}"))
    return 0


def _build(build: Build, channel: Channel, prepare: Callable[[], None]) -> Engine:
    def report(text: str, done: int, total: int) -> None:
        channel.send(Progress(text, done, total))

    return build(_receive_options(channel, prepare), report)


def _receive_options(channel: Channel, prepare: Callable[[], None]) -> Mapping[str, object]:
    while True:
        messages = channel.receive(None)
        if messages and isinstance(messages[0], Prepare):
            del messages[0]
            prepare()
        if not messages:
            continue
        if len(messages) != 1 or not isinstance(messages[0], Start):
            raise MessageError(
                "the API server's first message must be its options, and nothing else"
            )
        return messages[0].options


def _report(channel: Channel, fatal: Fatal) -> int:
    try:
        channel.send(fatal)
        channel.drain_backlog(PEER_GONE_GRACE_S)
    except PeerGoneError:
        _logger.error("%s", fatal.message)
    return 1
