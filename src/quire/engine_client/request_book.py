"""Open requests and the streams that their outputs are pushed into.

What the dispatcher of one engine and that of a fleet have in common: the bound, what came of each
request so far, who gets its outputs, and its end. Which process computes it is a dispatcher's
affair. Knows no process and no asyncio.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeAlias

from quire.core.request import Request, SequenceOutput
from quire.engine_client.recovery import OpenRequest
from quire.errors import InvalidRequestError, OverloadedError, QuireError

Abort: TypeAlias = Callable[[str, int | None], None]
"""Ends a request, by id, or one branch of it."""


class OutputSink(Protocol):
    """Where the outputs of one call's requests are pushed to as they come. Neither method may raise
    or wait."""

    def on_output(self, output: SequenceOutput) -> None:
        """One output. In here, branches may be aborted and the stream may be closed."""
        ...

    def on_end(self, error: QuireError | None) -> None:
        """The last call: every branch has ended, or `error` ended the stream."""
        ...


class RequestStream:
    """The open requests of one call, and the sink that their outputs are pushed into.

    Invariants: outputs come in the order in which the engine made them; the sink's `on_end` is
    called once, when every branch of every request has finished, was aborted, or an error ended
    the stream; nothing comes after it.
    """

    __slots__ = ("_abort", "_has_ended", "_open_ids", "_sink")

    def __init__(self, abort: Abort, request_ids: set[str], sink: OutputSink) -> None:
        """request_ids: of the call's requests; owned from now on. abort: of the dispatcher."""
        self._abort = abort
        self._open_ids = request_ids
        self._sink = sink
        self._has_ended = False

    def abort_branch(self, request_id: str, branch_index: int) -> None:
        """End one branch; no more of its outputs come. Nothing happens if it has ended."""
        if request_id in self._open_ids:
            self._abort(request_id, branch_index)

    def close(self) -> None:
        """Abort whatever is still running. May be called twice."""
        for request_id in list(self._open_ids):
            self._abort(request_id, None)

    def push(self, output: SequenceOutput) -> None:
        """For the dispatcher: an output of an open request."""
        if self._has_ended:
            return
        self._sink.on_output(output)
        if not self._open_ids:
            self.end(None)

    def forget(self, request_id: str) -> None:
        """For the dispatcher: all branches of a request have ended."""
        self._open_ids.discard(request_id)

    def end_if_done(self) -> None:
        """For the dispatcher: branches were aborted, which brings no output."""
        if not self._open_ids:
            self.end(None)

    def end(self, error: QuireError | None) -> None:
        """For the dispatcher: nothing more comes; a second call changes nothing."""
        if not self._has_ended:
            self._has_ended = True
            self._sink.on_end(error)


class RequestBook:
    """Invariant: a request is in the book exactly while outputs for it may come and be wanted;
    `num_open` counts the branches of those in it."""

    def __init__(
        self, max_num_open: int, abort: Abort, on_end: Callable[[OpenRequest], None]
    ) -> None:
        """max_num_open: branches of open requests. abort: what streams call. on_end: called with a
        request that was answered to its end or has failed, before its stream hears of it."""
        self.num_open = 0
        self._max_num_open = max_num_open
        self._abort = abort
        self._on_end = on_end
        self._open: dict[str, tuple[OpenRequest, RequestStream]] = {}

    def __iter__(self) -> Iterator[OpenRequest]:
        """Those in the book, in the order in which they came."""
        return iter([request for request, _ in self._open.values()])

    def get(self, request_id: str) -> OpenRequest | None:
        """The open request of this id."""
        return self._open.get(request_id, (None, None))[0]

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
            # How many are open is not said: that is other clients' affair.
            raise OverloadedError(
                f"the server has too many generations open to take {num_wanted} more: its bound is"
                f" {bound}; retry later"
            )

    def check(self, requests: Sequence[Request]) -> None:
        """Raises what `enter` must not be called with: OverloadedError, InvalidRequestError."""
        self.check_room(sum(request.n for request in requests))
        ids = {request.request_id for request in requests}
        if len(ids) < len(requests) or ids & self._open.keys():
            raise InvalidRequestError("request ids must be unique", "request_id")

    def enter(
        self, requests: Sequence[Request], sink: OutputSink, now_s: float
    ) -> tuple[RequestStream, list[OpenRequest]]:
        """Take in the requests of one call, which `check` has let pass."""
        stream = RequestStream(self._abort, {request.request_id for request in requests}, sink)
        opened = [OpenRequest(request, now_s) for request in requests]
        for request in opened:
            self._open[request.request_id] = request, stream
            self.num_open += request.request.n
        return stream, opened

    def take(self, output: SequenceOutput) -> None:
        """Hand an output to its stream, unless it is not wanted any more."""
        request, stream = self._open.get(output.request_id, (None, None))
        if request is None or stream is None or not request.take(output):
            return  # aborted while this output was under way
        if output.finish_reason is not None:
            self.num_open -= 1
            if not request.branches:
                self._forget(request)
                self._on_end(request)
        stream.push(output)

    def drop(self, request_id: str, branch_index: int | None) -> OpenRequest | None:
        """Its client wants no more of a request, or of one branch. Returns the request if there was
        anything to drop; its stream has not ended yet: see `end_if_done`."""
        request, _ = self._open.get(request_id, (None, None))
        if request is None:
            return None
        num_dropped = request.drop(branch_index)
        self.num_open -= num_dropped
        return request if num_dropped else None

    def end_if_done(self, request: OpenRequest) -> None:
        """After `drop`, once the process was told."""
        _, stream = self._open[request.request_id]
        if not request.branches:
            self._forget(request)
        stream.end_if_done()

    def fail(self, request_id: str, error: QuireError) -> None:
        """End one request with an error, and with it its stream."""
        request, stream = self._open.get(request_id, (None, None))
        if request is None or stream is None:
            return
        self.num_open -= request.drop(None)
        self._forget(request)
        self._on_end(request)
        stream.end(error)

    def end(self, error: QuireError) -> None:
        """End all streams."""
        streams = list(dict.fromkeys(stream for _, stream in self._open.values()))
        self._open.clear()
        self.num_open = 0
        for stream in streams:
            stream.end(error)

    def _forget(self, request: OpenRequest) -> None:
        _, stream = self._open.pop(request.request_id)
        stream.forget(request.request_id)
