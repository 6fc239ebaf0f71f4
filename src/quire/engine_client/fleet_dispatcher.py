"""Sends the requests of a fleet to its engines, and moves requests when an engine dies.

A request is sent to one engine at a time. When that engine dies or can't be reached, its requests
continue in other engines from the tokens received so far, unless `CrashAttribution` suspects them.
Messages that arrive over an old connection of a replica (its former wire) are dropped. So no token
is delivered twice, even if an abandoned engine still computes.

Pure: uses neither processes nor asyncio, and only the clock that is passed in. Called by `fleet`.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from quire.core.request import Request
from quire.core.sampling_params import ModelLimits
from quire.engine_client.failover.connected_replicas import (
    ConnectedReplica,
    ConnectedReplicas,
    Wire,
)
from quire.engine_client.failover.isolated_trials import IsolatedTrials
from quire.engine_client.messages import (
    AbortRequest,
    AddRequest,
    ClearPrefixes,
    Control,
    Outputs,
    RequestFailed,
    SetPaused,
    error_from,
    frames_of,
)
from quire.engine_client.process.activity import Activity, Doing
from quire.engine_client.recovery import Cause, Death
from quire.engine_client.request_book import OpenRequest, OutputSink, RequestBook, RequestStream
from quire.errors import QuireError, RequestKillsEngineError
from quire.ipc import encode
from quire.observability.log import get_logger

BLAMED = (
    "engines died repeatedly while they computed this request, so the request is ended and the"
    " others go on without it; don't send it again as it is"
)

logger = get_logger(__name__)


class Placement(Protocol):
    """Chooses replicas and tracks their load; implemented by `RoutedPlacement`, and for one
    engine by `OnlyPlacement`."""

    def add(self, replica: str, limits: ModelLimits, facts: Mapping[str, Any]) -> None:
        """Add a replica that takes requests. It has no requests and an empty cache."""
        ...

    def remove(self, replica: str) -> None:
        """Remove a replica with its load and its cache."""
        ...

    def set_accepting(self, replica: str, accepts: bool) -> None:
        """Set whether the replica gets new requests."""
        ...

    def place(self, request: Request) -> str | None:
        """Choose the replica for a request and count its load there; None if no replica takes
        it."""
        ...

    def forget_prefixes(self, replica: str) -> None:
        """Record that the replica's cache was emptied."""
        ...

    def set_slowness(self, replica: str, measured: float) -> None:
        """Set the ratio of the replica's measured to its predicted step times. Has no
        effect for an unknown replica."""
        ...

    def load_of(self, replica: str) -> Mapping[str, float]:
        """Load figures of a replica, by the figure's name; empty for an unknown replica."""
        ...

    def on_first_token(self, request_id: str) -> None:
        """Count the request's prompt as computed. Has no effect for a request that isn't placed."""
        ...

    def on_end(self, request_id: str) -> None:
        """Remove the request's load from its replica. Has no effect for a request that isn't
        placed."""
        ...


class FleetDispatcher:
    """Assigns each open request to one replica, or keeps it in a queue.

    Invariant: an open request is in exactly one of: a connected replica, `_waiting` until a
    replica takes requests, or the suspects of `trials` until its trial.
    """

    def __init__(self, max_num_open: int, clock: Callable[[], float], placement: Placement) -> None:
        """At most `max_num_open` branches of requests may be open. `clock` returns seconds from any
        fixed point."""
        self._book = RequestBook(max_num_open, self.abort, self._remove_ended)
        self.check_room = self._book.check_room
        self.fail_all = self._book.fail_all
        self._clock = clock
        self.placement = placement
        self.replicas = ConnectedReplicas()
        #: Requests that no replica could take, by id, in the order of their arrival.
        self._waiting: dict[str, OpenRequest] = {}
        self.trials = IsolatedTrials(self.replicas, self, clock)
        self._is_paused = False
        #: Whether all replicas are being ended, so that no request goes on.
        self.is_ending = False
        #: Number of requests that continued in another replica.
        self.num_moved = 0
        #: Number of requests that were ended because they had killed engines.
        self.num_blamed = 0

    @property
    def num_open(self) -> int:
        """Number of unfinished branches of open requests; a request with n samples has n."""
        return self._book.num_open

    # ---- for clients ------------------------------------------------------------------------

    def open(self, requests: Sequence[Request], sink: OutputSink) -> RequestStream:
        """Accept requests, and send them to replicas as soon as possible. Raises OverloadedError or
        InvalidRequestError; then no request was accepted."""
        stream, opened = self._book.enter(requests, sink, self._clock())
        for request, frame in opened:
            self._place(request, frame)
        return stream

    def abort(self, request_id: str, branch_index: int | None = None) -> None:
        """End a request, or one branch of it."""
        request = self._book.drop(request_id, branch_index)
        if request is None:
            return
        replica = self.replicas.replica_of(request_id)
        if replica is not None:
            replica.wire.send(encode(AbortRequest(request_id, branch_index)))
        if not request.branches:
            self._remove_ended(request, has_left=True)
        self._book.end_if_done(request)

    def send_control(self, message: Control) -> None:
        """Send a message to all replicas. If it is a pause, it is also sent to replicas that join
        later."""
        if isinstance(message, SetPaused):
            self._is_paused = message.paused
        for name, replica in self.replicas:
            replica.wire.send(encode(message))
            if isinstance(message, ClearPrefixes):
                self.placement.forget_prefixes(name)

    # ---- for the replicas -------------------------------------------------------------------

    def on_ready(
        self, name: str, wire: Wire, limits: ModelLimits, facts: Mapping[str, Any]
    ) -> None:
        """Add a replica that has no requests yet. It takes requests over `wire`."""
        self.replicas.add(name, wire)
        self.placement.add(name, limits, facts)
        # The engine may have been paused before it was lost.
        if self._is_paused or "engine_id" in facts:
            wire.send(encode(SetPaused(self._is_paused)))
        self.trials.start_next()  # a trial needs an empty replica
        self._place_waiting()

    def set_accepting(self, name: str, accepts: bool) -> None:
        """Set whether a ready replica gets new requests. A silent replica gets none in any case."""
        replica = self.replicas.get(name)
        if replica is not None:
            replica.is_closed = not accepts
            self.placement.set_accepting(name, replica.accepts and name != self.trials.reserved)
            self.trials.start_next()
            self._place_waiting()

    def on_message(self, name: str, wire: Wire, message: Outputs | RequestFailed) -> None:
        """Handle outputs or a failure that a replica sent."""
        replica = self.replicas.get(name)
        if replica is None or wire is not replica.wire:
            return
        if isinstance(message, RequestFailed):
            if message.request_id in replica.requests and message.request_id not in replica.leaving:
                self._book.fail(message.request_id, error_from(message))
            return
        # This loop runs for each token, so the attributes are looked up before it.
        requests, leaving = replica.requests, replica.leaving
        without_tokens, attribution = replica.without_tokens, self.trials.attribution
        for output in message.outputs:
            request = requests.get(output.request_id)
            if request is None or (leaving and output.request_id in leaving):
                continue  # the output is stale: its request has ended or was moved away
            if without_tokens and output.token_ids and output.request_id in without_tokens:
                without_tokens.remove(output.request_id)
                self.placement.on_first_token(output.request_id)
            if not request.record_output(output):
                continue  # its branch was aborted before this output arrived
            if output.finish_reason is not None:
                self._book.end_branch(request)
            request.stream.push(output)
            if request is attribution.trial:
                self.trials.note_output(request)
        if self.trials.waiting_since_s is not None:
            self.trials.start_next()

    def on_death(self, name: str, death: Death) -> frozenset[Death]:
        """Move the requests of a dead replica, and ignore its wire from now on. If a request is
        found guilty, returns all deaths that it caused, including this death; else an empty set."""
        replica = self.replicas.remove(name)
        if replica is None:
            return frozenset()
        self.placement.remove(name)
        requests = list(replica.requests.values())
        suspects = self.trials.attribution
        verdict = suspects.on_death(death, requests, had_trial=self.trials.run_in(replica))
        label = f"replica {name}" if name else "the engine"
        if death.cause is Cause.REQUESTED and self.is_ending:
            logger.info("%s was stopped for the shutdown", label)
        elif death.cause is Cause.REQUESTED:
            logger.info(
                "%s was stopped as requested; requests that go on: %d",
                *(label, len(verdict.continuing)),
            )
        else:
            logger.warning(
                "%s is gone (%s) while it was %s: requests that go on: %d; to be tried: %d",
                *(label, death.cause, death.activity.doing.name.lower()),
                *(len(verdict.continuing), suspects.num_waiting),
            )
        if verdict.blamed is not None:
            request_id = verdict.blamed.request_id
            logger.error("request %s is to blame: engines died while they computed it", request_id)
            self.num_blamed += bool(verdict.blamed.branches)  # else its client has left
            self._book.fail(request_id, RequestKillsEngineError(BLAMED))
        self.num_moved += len(verdict.continuing)
        # Requests that no replica takes now are queued before the requests that came later.
        waiting, self._waiting = self._waiting, {}
        for request in verdict.continuing:
            self._place(request)
        self._waiting |= waiting
        self.trials.start_next()
        return verdict.explained

    def on_gone(self, name: str) -> None:
        """Remove a replica that was ended on purpose or has failed for good, and move its
        requests."""
        self.on_death(name, Death(Activity(Doing.IDLE), status=0, is_requested=True))

    def undo_losses(self, request_ids: Iterable[str]) -> None:
        """Stop counting the loss of a replica against these requests, since the replica is
        alive."""
        found = [self._book.get(request_id) for request_id in request_ids]
        self.trials.attribution.undo_loss([request for request in found if request is not None])

    def move_all(self, name: str) -> None:
        """Move a replica's requests to other replicas, and give it no new requests. A request on
        trial stays, because a trial needs a replica without other requests. Its trial is repeated
        once the replica is gone."""
        replica = self.replicas.get(name)
        if replica is None:
            return
        self.set_accepting(name, False)
        for request in list(replica.requests.values()):
            if request is not self.trials.attribution.trial:
                self.move(request)

    # ---- for the trials ---------------------------------------------------------------------

    def move(self, request: OpenRequest) -> None:
        """See `RequestMover`. Aborts the request in its present replica. If no other replica takes
        requests, the request stays."""
        replica = self.replicas.replica_of(request.request_id)
        if replica is None or not request.branches or not self.takes_any(beside=replica):
            return  # the request stays, so its load must stay counted
        self.placement.on_end(request.request_id)
        target = self.placement.place(request.request)
        assert target is not None, "a replica takes requests"
        replica.abort_moved(request.request_id)
        self.replicas.unassign(request.request_id)
        self.send_to(request, target)
        self.num_moved += 1

    def send_to(self, request: OpenRequest, name: str, frame: bytes | None = None) -> None:
        """See `RequestMover`. `frame` is the encoded request if nothing was generated yet."""
        replica = self.replicas.assign(request, name)
        if request.request.contents:
            replica.wire.send(frames_of(request.to_send(self._clock())))
        else:
            replica.wire.send(frame or encode(AddRequest(request.to_send(self._clock()))))

    def reserve_for_trials(self, name: str, *, is_reserved: bool) -> None:
        """See `RequestMover`."""
        replica = self.replicas.get(name)
        assert replica is not None, "it takes requests"
        self.placement.set_accepting(name, not is_reserved and replica.accepts)
        if not is_reserved:
            self._place_waiting()
            return
        for request in list(replica.requests.values()):
            self.move(request)

    def on_end(self, error: QuireError) -> None:
        """End all open requests with `error`, since no replica will take requests any more."""
        for name, _ in self.replicas:
            self.placement.remove(name)
        self.replicas.clear()
        self._waiting.clear()
        self.trials = IsolatedTrials(self.replicas, self, self._clock)
        self._book.end(error)

    # ---- helpers ----------------------------------------------------------------------------

    def _place(self, request: OpenRequest, frame: bytes | None = None) -> None:
        """Send a request to a replica, or keep it waiting. `frame` is the encoded request if
        nothing was generated yet."""
        if not request.branches:
            return
        target = self.placement.place(request.request)
        if target is None:
            self._waiting[request.request_id] = request
        else:
            self.send_to(request, target, frame)

    def takes_any(self, beside: ConnectedReplica | None = None) -> bool:
        """Whether any replica other than `beside` takes new requests."""
        return any(
            replica is not beside and replica.accepts and name != self.trials.reserved
            for name, replica in self.replicas
        )

    def _place_waiting(self) -> None:
        waiting, self._waiting = self._waiting, {}
        for request in waiting.values():
            self._place(request)

    def _remove_ended(self, request: OpenRequest, *, has_left: bool = False) -> None:
        """Remove a request that was answered, refused or blamed, or whose client has left."""
        self._waiting.pop(request.request_id, None)
        self.replicas.unassign(request.request_id)
        self.placement.on_end(request.request_id)
        if has_left:
            self.trials.leave(request)
        else:
            self.trials.remove(request)
