"""Open requests and the streams that receive their outputs.

The book limits the number of open requests, and keeps each request's stream and its tokens so far.
`fleet_dispatcher` decides which process computes a request.
"""

from collections.abc import Callable, Sequence
from typing import Protocol, TypeAlias

from quire.core.request import Request, SequenceOutput
from quire.engine_client.messages import AddRequest, without_values
from quire.errors import InvalidRequestError, OverloadedError, QuireError
from quire.ipc import MessageError, encode

Abort: TypeAlias = Callable[[str, int | None], None]
"""Ends a request, by id, or one branch of it."""


class OutputSink(Protocol):
    """Receives the outputs of one call's requests. Its methods must not raise or wait."""

    def on_output(self, output: SequenceOutput) -> None:
        """Handle one output. May abort branches and close the stream."""
        ...

    def on_end(self, error: QuireError | None) -> None:
        """Handle the end, as the last call: every branch has ended, or `error` ended the stream."""
        ...


class RequestStream:
    """The open requests of one call, and the sink of their outputs.

    Invariants: outputs come in the order in which the engine made them. The sink's `on_end` is
    called once, as the last call, after every branch of every request has finished or was aborted,
    or an error ended the stream.
    """

    __slots__ = ("_abort", "_has_ended", "_open_ids", "_sink")

    def __init__(self, abort: Abort, request_ids: set[str], sink: OutputSink) -> None:
        """Takes ownership of `request_ids`. `abort` is the dispatcher's method."""
        self._abort = abort
        self._open_ids = request_ids
        self._sink = sink
        self._has_ended = False

    def abort_branch(self, request_id: str, branch_index: int) -> None:
        """End one branch and drop its later outputs. Has no effect if it has ended."""
        if request_id in self._open_ids:
            self._abort(request_id, branch_index)

    def close(self) -> None:
        """Abort all that is still running. May be called twice."""
        for request_id in list(self._open_ids):
            self._abort(request_id, None)

    def push(self, output: SequenceOutput) -> None:
        """Pass on an output of an open request. Called by the dispatcher."""
        if self._has_ended:
            return
        self._sink.on_output(output)
        if not self._open_ids:
            self.end(None)

    def forget(self, request_id: str) -> None:
        """Remove a request whose branches have all ended. Called by the dispatcher."""
        self._open_ids.discard(request_id)

    def end_if_done(self) -> None:
        """End the stream if its last branch was aborted, since an abort produces no output. Called
        by the dispatcher."""
        if not self._open_ids:
            self.end(None)

    def end(self, error: QuireError | None) -> None:
        """End the stream. A second call has no effect. Called by the dispatcher."""
        if not self._has_ended:
            self._has_ended = True
            self._sink.on_end(error)


class OpenRequest:
    """A request that was accepted, and its outputs so far."""

    __slots__ = ("accepted_s", "branches", "has_output", "request", "stream")

    def __init__(self, request: Request, accepted_s: float, stream: RequestStream) -> None:
        self.request = request
        self.accepted_s = accepted_s
        #: The stream of the call that the request belongs to.
        self.stream = stream
        #: Maps the index of each unfinished branch to its tokens so far.
        self.branches: dict[int, list[int]] = {index: [] for index in range(request.n)}
        #: Whether any branch, even an ended one, has produced a token.
        self.has_output = False

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def num_tokens(self) -> int:
        """Number of tokens so far in the unfinished branches."""
        return sum(map(len, self.branches.values()))

    @property
    def is_beam_search(self) -> bool:
        """Whether it is a beam search, which returns all of its outputs at its end."""
        return self.request.params.beam_width > 0

    def record_output(self, output: SequenceOutput) -> bool:
        """Record an output. Returns whether it is still wanted."""
        token_ids = self.branches.get(output.branch_index)
        if token_ids is None:
            return False
        token_ids += output.token_ids
        if output.token_ids:
            self.has_output = True
        if output.finish_reason is not None:
            del self.branches[output.branch_index]
        return True

    def drop(self, branch_index: int | None) -> int:
        """Remove a branch (None: all branches) that ends without an output. Returns the number of
        branches removed."""
        num_before = len(self.branches)
        if branch_index is None:
            self.branches.clear()
        else:
            self.branches.pop(branch_index, None)
        return num_before - len(self.branches)

    def to_send(self, now_s: float) -> Request:
        """The request to send to another engine process, which resumes it from its tokens so
        far."""
        elapsed_s = now_s - self.accepted_s
        return self.request.resume(self.branches, has_output=self.has_output, elapsed_s=elapsed_s)


class RequestBook:
    """All open requests.

    Invariant: the book holds a request exactly while engines may still send outputs that its client
    wants. `num_open` counts the open branches of all requests.
    """

    def __init__(
        self, max_num_open: int, abort: Abort, on_end: Callable[[OpenRequest], None]
    ) -> None:
        """At most `max_num_open` branches may be open. Streams call `abort`. `on_end` is called
        with a request that has ended or failed, before its stream is notified."""
        self.num_open = 0
        self._max_num_open = max_num_open
        self._abort = abort
        self._on_end = on_end
        self._open: dict[str, OpenRequest] = {}

    def get(self, request_id: str) -> OpenRequest | None:
        """The open request of this id, or None."""
        return self._open.get(request_id)

    def check_room(self, num_wanted: int) -> None:
        """Raises OverloadedError if `num_wanted` more branches don't fit now, InvalidRequestError
        if they would never fit."""
        bound = self._max_num_open
        if num_wanted > bound:
            raise InvalidRequestError(
                f"{num_wanted} generations at once (prompts times n), above the bound of {bound}; "
                "send them in several calls"
            )
        if self.num_open + num_wanted > bound:
            # The message leaves out the number of open requests, since that would tell about other
            # clients.
            raise OverloadedError(
                f"the server has too many generations open to take {num_wanted} more: its bound is"
                f" {bound}; retry later"
            )

    def enter(
        self, requests: Sequence[Request], sink: OutputSink, now_s: float
    ) -> tuple[RequestStream, list[tuple[OpenRequest, bytes]]]:
        """Add the requests of one call.

        Returns their stream, and each request with its encoded AddRequest message, in which the
        values of contents are missing. Raises OverloadedError or InvalidRequestError; then no
        request was added.
        """
        # First, refuse requests that can't be added or sent.
        self.check_room(sum(request.n for request in requests))
        ids = {request.request_id for request in requests}
        if len(ids) < len(requests) or ids & self._open.keys():
            raise InvalidRequestError("request ids must be unique", "request_id")
        try:
            frames = [encode(AddRequest(without_values(request))) for request in requests]
        except MessageError as error:
            raise InvalidRequestError(str(error)) from error
        # Then add them.
        stream = RequestStream(self._abort, ids, sink)
        opened = [OpenRequest(request, now_s, stream) for request in requests]
        for request in opened:
            self._open[request.request_id] = request
            self.num_open += request.request.n
        return stream, list(zip(opened, frames, strict=True))

    def end_branch(self, request: OpenRequest) -> None:
        """Count that a branch of a request has ended with an output."""
        self.num_open -= 1
        if not request.branches:
            self._forget(request)
            self._on_end(request)

    def drop(self, request_id: str, branch_index: int | None) -> OpenRequest | None:
        """Drop a request, or one branch, that its client no longer wants. Returns the request, or
        None if nothing was dropped. Its stream ends later, by `end_if_done`."""
        request = self._open.get(request_id)
        if request is None:
            return None
        num_dropped = request.drop(branch_index)
        self.num_open -= num_dropped
        return request if num_dropped else None

    def end_if_done(self, request: OpenRequest) -> None:
        """End the stream of a dropped request if that was its last request. Called after the abort
        was sent."""
        if not request.branches:
            self._forget(request)
        request.stream.end_if_done()

    def fail(self, request_id: str, error: QuireError) -> None:
        """End one request, and with it its stream, with an error."""
        request = self._open.get(request_id)
        if request is None:
            return
        self.num_open -= request.drop(None)
        self._forget(request)
        self._on_end(request)
        request.stream.end(error)

    def fail_all(self, error: QuireError) -> None:
        """End all open requests with an error. Engines may still compute them."""
        for request_id in list(self._open):
            self.fail(request_id, error)

    def end(self, error: QuireError) -> None:
        """End all streams."""
        streams = list(dict.fromkeys(request.stream for request in self._open.values()))
        self._open.clear()
        self.num_open = 0
        for stream in streams:
            stream.end(error)

    def _forget(self, request: OpenRequest) -> None:
        del self._open[request.request_id]
        request.stream.forget(request.request_id)
