"""An engine that restarts its process when the process dies, and resumes the open requests.

`AsyncEngine.start` starts an engine process and waits until it is ready. `generate` sends requests,
pushes their outputs into a sink, and returns their `RequestStream`. Closing the stream aborts its
requests that are still running.

When the process dies, or hangs in a step, it is restarted. Every open request continues from the
tokens received so far, so its sink notices only a pause. A request that repeatedly kills the
process ends with an error instead. However the server's process ends, no engine process stays
behind.

    supervisor    runs one process after the other, each behind a `link`
    recovery      decides which requests continue, and which request has caused a death
    Dispatcher    below: sends requests to the process and passes on outputs

Imports no code for HTTP or text, and no torch. Called by `server`.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from quire.core.request import Request
from quire.core.sampling_params import ModelLimits
from quire.engine_client.messages import (
    AbortRequest,
    AddRequest,
    Control,
    GetStats,
    OnProgress,
    Outputs,
    Ping,
    Question,
    RequestFailed,
    SetPaused,
    error_from,
)
from quire.engine_client.process.process_link import ENGINE_COMMAND, ProcessLink
from quire.engine_client.process.supervisor import Supervisor, ask_link
from quire.engine_client.recovery import (
    Death,
    EngineState,
    OpenRequest,
    RecoveryConfig,
    ResumeQueue,
)
from quire.engine_client.request_book import OutputSink, RequestBook, RequestStream
from quire.errors import (
    EngineDeadError,
    QuireError,
    RequestKillsEngineError,
)
from quire.ipc import encode
from quire.observability.log import get_logger

DEFAULT_MAX_QUEUED_REQUESTS = 1024
DEFAULT_RECOVERY = RecoveryConfig()

logger = get_logger(__name__)


class AsyncEngine:
    """An engine, independent of the process that it currently runs in. Belongs to one event
    loop."""

    def __init__(self, supervisor: Supervisor, dispatcher: "Dispatcher") -> None:
        """Use `start` instead."""
        #: See `Supervisor.find_adapter`.
        self.find_adapter = supervisor.find_adapter
        #: See `Dispatcher.abort`.
        self.abort = dispatcher.abort
        self._supervisor = supervisor
        self._dispatcher = dispatcher

    @classmethod
    async def start(
        cls,
        options: Mapping[str, object],
        *,
        max_queued_requests: int = DEFAULT_MAX_QUEUED_REQUESTS,
        command: Sequence[str] = ENGINE_COMMAND,
        recovery: RecoveryConfig = DEFAULT_RECOVERY,
        on_progress: OnProgress | None = None,
    ) -> "AsyncEngine":
        """Start the engine process and wait until it is ready for requests.

        options: those of `assembly.build.build_engine`. Values are numbers, strings, booleans,
            None, and lists and dicts of them.
        max_queued_requests: the most requests that may be open, whether they wait or run. A request
            for n samples counts n times.
        command: the program to run. `--fd N` and the arguments of logging are appended.
        on_progress: called with the progress of the first process until it is ready.

        Raises the errors of `build_engine` (ConfigurationError and its subclasses), EngineDeadError
        if the process ended without a message, and MessageError for options that can't be sent.
        When this method raises or is cancelled, the process is gone.
        """
        dispatcher = Dispatcher(max_queued_requests, asyncio.get_running_loop().time)
        open_link = partial(ProcessLink, command=command)
        supervisor = Supervisor(options, open_link, recovery, dispatcher, on_progress)
        await supervisor.start()
        return cls(supervisor, dispatcher)

    # ---- state ------------------------------------------------------------------------------

    @property
    def state(self) -> EngineState:
        return self._supervisor.state

    @property
    def failure(self) -> QuireError | None:
        """The reason why the engine has failed for good; None before that."""
        return self._supervisor.failure

    @property
    def limits(self) -> ModelLimits:
        """The limits that the engine was built for."""
        assert self._supervisor.limits is not None, "the engine was never ready"
        return self._supervisor.limits

    @property
    def facts(self) -> Mapping[str, Any]:
        """Facts about the current process by name, for display (see `build_engine`)."""
        return self._supervisor.facts

    @property
    def num_restarts(self) -> int:
        """Number of restarts after deaths of the process."""
        return self._supervisor.num_restarts

    @property
    def is_alive(self) -> bool:
        """Whether the engine takes requests, now or as soon as it has recovered."""
        return self.state in (EngineState.READY, EngineState.RECOVERING)

    @property
    def pid(self) -> int | None:
        """The id of the process; None while there is none."""
        return self._supervisor.pid

    @property
    def engines_by_name(self) -> "Mapping[str, AsyncEngine]":
        """See `EngineClient`."""
        return {"": self}

    @property
    def num_open(self) -> int:
        """Number of unfinished branches of open requests; a request with n samples has n."""
        return self._dispatcher.num_open

    @property
    def last_step_age_s(self) -> float:
        """Seconds since the last message of the process; 0 while there is no process. It is sent
        several pings per `heartbeat_timeout_s`, and answers them between steps."""
        return self._supervisor.silence_s

    # ---- requests and control ---------------------------------------------------------------

    def check_room(self, num_generations: int) -> None:
        """Raises the error that `generate` would now raise for `num_generations`, the number of
        prompts times n: EngineDeadError, OverloadedError, or InvalidRequestError if they would
        never fit."""
        self._check_alive()
        self._dispatcher.check_room(num_generations)

    def generate(self, requests: Sequence[Request], sink: OutputSink) -> "RequestStream":
        """Accept requests. Their outputs are pushed into `sink` after this returns.

        Raises OverloadedError if they exceed the limit of open requests, EngineDeadError, and
        InvalidRequestError for an id that is in use. The stream ends with an error if the engine
        refuses a request. It ends with RequestKillsEngineError if one of its requests repeatedly
        kills the process, and with EngineDeadError if the engine fails for good or is shut down.
        """
        self._check_alive()
        return self._dispatcher.open(requests, sink)

    async def send_control(self, message: Control) -> None:
        """Pause or continue the engine's steps, or clear its cached prefixes.

        When this returns, the engine has read the message, or there is no process. A restarted
        process starts paused if the last SetPaused said so. Raises EngineDeadError.
        """
        self._check_alive()
        self._dispatcher.send_control(message)
        link = self._supervisor.link
        if link is not None:  # else the next process gets the message at its start
            await link.ask(Ping())

    async def stats(self, timeout_s: float = 10.0) -> dict[str, Any]:
        """The engine's EngineStats by field name. Raises as `ask` does."""
        return await self.ask(GetStats(), timeout_s)

    async def ask(self, question: Question, timeout_s: float = 10.0) -> dict[str, Any]:
        """The fields of the engine's reply to a question, answered between two steps.

        Raises EngineDeadError while the engine recovers, or if no reply comes within `timeout_s`
        because a step does not end.
        """
        self._check_alive()
        return await ask_link(self._supervisor.link, question, timeout_s)

    async def wait_failed(self) -> QuireError:
        """Wait until the engine has failed for good. Returns the reason."""
        return await self._supervisor.wait_failed()

    async def shutdown(
        self, *, drain: bool = True, timeout_s: float = 30.0, reason: QuireError | None = None
    ) -> None:
        """End the process. With `drain`, it finishes its open requests first. A process that still
        runs after `timeout_s` is killed.

        Streams that are still open raise `reason`. When this returns or is cancelled, the process
        is gone. May be called twice.
        """
        await self._supervisor.shutdown(drain=drain, timeout_s=timeout_s, reason=reason)

    def _check_alive(self) -> None:
        if not self.is_alive:
            raise EngineDeadError("the engine is not running, so it takes no requests")


class Wire(Protocol):
    """The connection to an engine process; implemented by `link.EngineLink`."""

    def send(self, frame: bytes) -> None:
        """Send an encoded message."""
        ...

    def call_between_steps(self, call: Callable[[], None]) -> None:
        """Call `call` in this process, when the engine's process reports that it is between two
        steps and has read all messages sent so far. If that process dies first, `call` is never
        called."""
        ...


class Dispatcher:
    """Sends open requests to the process and passes their outputs on.

    After the process has died, `recovery.ResumeQueue` decides in which order requests are sent
    again, and which request has caused the death. The `RequestBook` keeps the received tokens, so
    no token is requested twice. The dispatcher is the supervisor's `EngineListener`. Messages from
    earlier connections (wires) are ignored.
    """

    def __init__(self, max_num_open: int, clock: Callable[[], float]) -> None:
        """At most `max_num_open` branches may be open. `clock` returns seconds from any fixed
        point."""
        self._queue = ResumeQueue()
        self._book = RequestBook(max_num_open, self.abort, lambda request: self._queue.end(request))
        self.check_room = self._book.check_room
        self._clock = clock
        self._wire: Wire | None = None
        self._is_paused = False

    @property
    def num_open(self) -> int:
        """Number of unfinished branches of open requests; a request with n samples has n."""
        return self._book.num_open

    # ---- for clients ------------------------------------------------------------------------

    def open(self, requests: Sequence[Request], sink: OutputSink) -> RequestStream:
        """Accept requests, and send them as soon as there is a process. Raises OverloadedError or
        InvalidRequestError; then no request was accepted."""
        stream, opened = self._book.enter(requests, sink, self._clock())
        for request, frame in opened:
            # After a death, new requests wait until the trials are over.
            may_go = self._wire is not None and self._queue.is_idle
            self._queue.add(request)
            if self._wire is not None and may_go:
                self._queue.next_to_send()
                self._wire.send(frame)
        return stream

    def abort(self, request_id: str, branch_index: int | None = None) -> None:
        """End a request, or one branch of it, before the engine's next step.

        Its stream continues with the other requests and branches. Unknown requests are ignored.
        """
        request = self._book.drop(request_id, branch_index)
        if request is None:
            return
        is_sent = self._queue.is_sent(request)
        is_on_trial = not request.branches and self._queue.remove_request(request)
        if is_sent and self._wire is not None:
            self._wire.send(encode(AbortRequest(request_id, branch_index)))
            # The process may still compute the request, so its trial lasts until the step has
            # ended.
            if is_on_trial:
                self._wire.call_between_steps(lambda: self._clear(request))
        self._book.end_if_done(request)

    # ---- for the supervisor and its link ----------------------------------------------------

    def send_control(self, message: Control) -> None:
        """Send a message to the process. Later processes also get a SetPaused, but no
        ClearPrefixes, since they start without cached prefixes."""
        if isinstance(message, SetPaused):
            self._is_paused = message.paused
        if self._wire is not None:
            self._wire.send(encode(message))

    def on_ready(self, wire: Wire) -> None:
        """See `EngineListener`. Open requests continue, and new ones are sent."""
        self._wire = wire
        if self._is_paused:
            wire.send(encode(SetPaused(True)))
        self._send_next()

    def on_message(self, wire: Wire, message: Outputs | RequestFailed) -> None:
        """See `OutputListener`."""
        if wire is not self._wire:
            return
        if isinstance(message, Outputs):
            for output in message.outputs:
                self._book.deliver(output)
        else:
            self._book.fail(message.request_id, error_from(message))
        if not self._queue.is_idle:
            self._send_next()

    def on_death(self, death: Death) -> frozenset[Death]:
        """See `EngineListener`."""
        self._wire = None
        verdict = self._queue.on_death(death)
        if verdict.blamed is None:
            logger.warning(
                "the engine died of: %s; it was: %s; requests to be tried: %d",
                death.cause,
                death.activity.doing.name.lower(),
                self._queue.num_suspects,
            )
            return verdict.explained
        request_id = verdict.blamed.request_id
        logger.error("request %s is to blame: the engine died twice on its trial", request_id)
        self._book.fail(
            request_id,
            RequestKillsEngineError(
                "the engine died twice while it computed this request, so the request is ended and"
                " the others go on without it; don't send it again as it is"
            ),
        )
        return verdict.explained

    def on_end(self, error: QuireError) -> None:
        """See `EngineListener`."""
        self._wire = None
        self._queue = ResumeQueue()
        self._book.end(error)

    # ---- helpers ----------------------------------------------------------------------------

    def _send_next(self) -> None:
        """Send all requests that the queue allows now."""
        now_s = self._clock()
        while self._wire is not None and (request := self._queue.next_to_send()) is not None:
            self._wire.send(encode(AddRequest(request.to_send(now_s))))

    def _clear(self, request: OpenRequest) -> None:
        self._queue.clear(request)
        self._send_next()
