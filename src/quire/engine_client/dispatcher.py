"""The open requests of a front: what is sent to the engine process, where its outputs go, and what
is sent again when the process was started anew.

The order and the blame after a death are `recovery.Roster`'s; the tokens that came are kept here,
so nothing is asked for twice. Knows no process, only the wire to it. Made by `async_engine`.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from quire.core.request import Request, SequenceOutput
from quire.engine_client.messages import (
    AbortRequest,
    AddRequest,
    MessageError,
    Outputs,
    RequestFailed,
    encode,
    error_from,
)
from quire.engine_client.recovery import Death, OpenRequest, Roster
from quire.engine_client.request_stream import RequestStream
from quire.errors import (
    InvalidRequestError,
    OverloadedError,
    QuireError,
    RequestKillsEngineError,
)
from quire.observability.log import get_logger

logger = get_logger(__name__)


class Wire(Protocol):
    """The way to a process: `engine_link.EngineLink`."""

    def send(self, frame: bytes) -> None:
        """Send an encoded message."""
        ...

    def call_between_steps(self, call: Callable[[], None]) -> None:
        """Once the process has taken in all that was sent, and computes no step. Not called if the
        process dies before."""
        ...


class Dispatcher:
    """Invariant: a request is in `_open` and `_streams` exactly while outputs for it may come and
    be wanted; `num_open` counts their branches."""

    def __init__(self, max_num_open: int, clock: Callable[[], float]) -> None:
        """max_num_open: branches of open requests. clock: seconds from any fixed point."""
        self.num_open = 0
        self._max_num_open = max_num_open
        self._clock = clock
        self._wire: Wire | None = None
        self._roster = Roster()
        self._open: dict[str, OpenRequest] = {}
        self._streams: dict[str, RequestStream] = {}

    # ---- for clients ------------------------------------------------------------------------

    def check_room(self, num_wanted: int) -> None:
        """Raises OverloadedError where so many branches more don't fit, InvalidRequestError where
        they never will."""
        bound = self._max_num_open
        if num_wanted > bound:
            raise InvalidRequestError(
                f"{num_wanted} generations at once (prompts times n), above the bound of {bound}; "
                "send them in several calls"
            )
        if self.num_open + num_wanted > bound:
            # How many are open is not told: it is other clients' affair.
            raise OverloadedError(
                f"the server has too many generations open to take {num_wanted} more: its bound is"
                f" {bound}; retry later"
            )

    def open(self, requests: Sequence[Request]) -> RequestStream:
        """Take requests in and send them when there is a process. Raises OverloadedError,
        InvalidRequestError; then none was taken in."""
        self.check_room(sum(request.n for request in requests))
        ids = {request.request_id for request in requests}
        if len(ids) < len(requests) or ids & self._open.keys():
            raise InvalidRequestError("request ids must be unique", "request_id")
        try:
            frames = [encode(AddRequest(request)) for request in requests]
        except MessageError as error:
            raise InvalidRequestError(str(error)) from error
        now_s = self._clock()
        opened = [OpenRequest(request, now_s) for request in requests]
        stream = RequestStream(self, opened)
        for one, frame in zip(opened, frames, strict=True):
            self._open[one.request_id] = one
            self._streams[one.request_id] = stream
            self.num_open += len(one.branches)
            may_go = self._wire is not None and self._roster.is_idle
            self._roster.add(one)
            if self._wire is not None and may_go:
                self._roster.next_to_send()
                self._wire.send(frame)
        return stream

    def abort(self, request_id: str, branch_index: int | None = None) -> None:
        """See `AsyncEngine.abort`."""
        one = self._open.get(request_id)
        if one is None:
            return
        num_dropped = one.drop(branch_index)
        if not num_dropped:
            return
        stream = self._streams[request_id]
        self.num_open -= num_dropped
        is_sent, is_on_trial = self._roster.is_sent(one), False
        if not one.branches:
            self._forget(one)
            is_on_trial = self._roster.leave(one)
        if is_sent and self._wire is not None:
            self._wire.send(encode(AbortRequest(request_id, branch_index)))
            if is_on_trial:
                self._wire.call_between_steps(lambda: self._clear(one))
        stream.settle(request_id)

    # ---- for the keeper ---------------------------------------------------------------------

    def on_ready(self, wire: Wire) -> None:
        """See `EngineListener`: those that were open go on, those that came meanwhile begin."""
        self._wire = wire
        self._send_those_who_may()

    def on_message(self, message: Outputs | RequestFailed) -> None:
        """See `EngineListener`."""
        if isinstance(message, Outputs):
            for output in message.outputs:
                self._push(output)
        else:
            self._fail(message.request_id, error_from(message))
        if not self._roster.is_idle:
            self._send_those_who_may()

    def on_death(self, death: Death) -> frozenset[Death]:
        """See `EngineListener`."""
        self._wire = None
        verdict = self._roster.on_death(death)
        if verdict.blamed is None:
            logger.warning(
                "the engine died of: %s; it was: %s; requests to be tried: %d",
                death.cause,
                death.activity.doing.name.lower(),
                self._roster.num_suspects,
            )
            return verdict.explained
        request_id = verdict.blamed.request_id
        logger.error("request %s is to blame: the engine died twice on its trial", request_id)
        self._fail(
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
        streams = list(dict.fromkeys(self._streams.values()))
        self._open.clear()
        self._streams.clear()
        self._roster = Roster()
        self.num_open = 0
        for stream in streams:
            stream.fail(error)

    # ---- within -----------------------------------------------------------------------------

    def _send_those_who_may(self) -> None:
        now_s = self._clock()
        while self._wire is not None and (one := self._roster.next_to_send()) is not None:
            self._wire.send(encode(AddRequest(one.to_send(now_s))))

    def _clear(self, one: OpenRequest) -> None:
        self._roster.clear(one)
        self._send_those_who_may()

    def _push(self, output: SequenceOutput) -> None:
        one = self._open.get(output.request_id)
        if one is None or not one.take(output):
            return  # aborted while this output was under way
        stream = self._streams[output.request_id]
        if output.finish_reason is not None:
            self.num_open -= 1
            if not one.branches:
                self._forget(one)
                self._roster.end(one)
        stream.push(output)

    def _fail(self, request_id: str, error: QuireError) -> None:
        """End one request with an error, and with it its stream."""
        one = self._open.get(request_id)
        if one is None:
            return
        stream = self._streams[request_id]
        self.num_open -= one.drop(None)
        self._forget(one)
        self._roster.end(one)
        stream.fail(error)

    def _forget(self, one: OpenRequest) -> None:
        del self._open[one.request_id], self._streams[one.request_id]
