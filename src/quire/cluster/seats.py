"""Tracks which replica of a fleet computes which request.

Used by `fleet_dispatcher`.
"""

from collections import Counter
from collections.abc import Iterator

from quire.engine_client.async_engine import Wire
from quire.engine_client.messages import AbortRequest
from quire.engine_client.recovery import OpenRequest
from quire.ipc import encode


class Seat:
    """The dispatcher's record of a replica that takes requests, and of the requests sent to it."""

    def __init__(self, wire: Wire) -> None:
        #: The connection to the replica.
        self.wire = wire
        #: The replica's requests by id, in the order in which they were sent.
        self.requests: dict[str, OpenRequest] = {}
        #: Ids of the requests for which the replica has sent tokens.
        self.begun: set[str] = set()
        #: By request id, how many of its moves away from this replica may still have tokens on the
        #: wire. The request may have come back since.
        self.leaving: Counter[str] = Counter()
        #: Whether the replica is being drained and gets no new requests.
        self.is_closed = False
        #: Whether the replica has stopped answering; it gets no new requests until it answers.
        self.is_silent = False

    @property
    def accepts(self) -> bool:
        """Whether the replica may get new requests."""
        return not (self.is_closed or self.is_silent)

    def let_go(self, request_id: str) -> None:
        """Abort a request that continues elsewhere. Outputs of it that arrive before the engine has
        handled the abort are dropped."""
        self.leaving[request_id] += 1
        self.wire.send(encode(AbortRequest(request_id)))
        self.wire.call_between_steps(lambda: self._has_left(request_id))

    def _has_left(self, request_id: str) -> None:
        self.leaving[request_id] -= 1
        if not self.leaving[request_id]:
            del self.leaving[request_id]

    @property
    def num_branches(self) -> int:
        """The number of open branches of the replica's requests."""
        return sum(len(request.branches) for request in self.requests.values())


class Seats:
    """Maps replica names to their seats. Invariant: a request is in at most one seat."""

    def __init__(self) -> None:
        self._seats: dict[str, Seat] = {}
        self._places: dict[str, str] = {}  # request id -> replica

    def __iter__(self) -> Iterator[tuple[str, Seat]]:
        return iter(self._seats.items())

    def __len__(self) -> int:
        return len(self._seats)

    def __contains__(self, replica: str) -> bool:
        return replica in self._seats

    def get(self, replica: str) -> Seat | None:
        """The seat of a replica that takes requests, else None."""
        return self._seats.get(replica)

    def add(self, replica: str, wire: Wire) -> None:
        """Add a replica that takes requests and has none yet."""
        self._seats[replica] = Seat(wire)

    def remove(self, replica: str) -> Seat | None:
        """Remove a replica. Its requests are in no seat from now on."""
        seat = self._seats.pop(replica, None)
        if seat is not None:
            for request_id in seat.requests:
                del self._places[request_id]
        return seat

    def clear(self) -> None:
        """Remove all replicas."""
        self._seats.clear()
        self._places.clear()

    def put(self, request: OpenRequest, replica: str) -> Seat:
        """Put a request into the seat of its replica. Returns the seat."""
        seat = self._seats[replica]
        assert request.request_id not in self._places, "it is in a seat"
        seat.requests[request.request_id] = request
        self._places[request.request_id] = replica
        return seat

    def take(self, request_id: str) -> None:
        """Take a request out of its seat, if it is in one."""
        replica = self._places.pop(request_id, None)
        if replica is not None:
            seat = self._seats[replica]
            del seat.requests[request_id]
            seat.begun.discard(request_id)

    def of(self, request_id: str) -> Seat | None:
        """The seat of a request, or None."""
        replica = self._places.get(request_id)
        return None if replica is None else self._seats[replica]

    def where(self, request_id: str) -> str | None:
        """The name of a request's replica, or None."""
        return self._places.get(request_id)
