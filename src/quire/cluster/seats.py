"""Which replica computes which request of a fleet. Used by `fleet_dispatcher`."""

from collections import Counter
from collections.abc import Iterator

from quire.engine_client.async_engine import Wire
from quire.engine_client.messages import AbortRequest
from quire.engine_client.recovery import OpenRequest
from quire.ipc import encode


class Seat:
    """A replica that takes requests.

    wire: to it. requests: those that it computes, in the order in which they were sent; of those in
    `begun`, it has brought tokens. leaving: requests that were moved from here, and of which tokens
    may still be under way; they may be here again. is_closed: it is drained, and gets no new ones.
    is_silent: it has stopped answering, and gets no new ones until it answers.
    """

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self.requests: dict[str, OpenRequest] = {}
        self.begun: set[str] = set()
        self.leaving: Counter[str] = Counter()
        self.is_closed = False
        self.is_silent = False

    @property
    def accepts(self) -> bool:
        """Whether it may get new requests."""
        return not (self.is_closed or self.is_silent)

    def let_go(self, request_id: str) -> None:
        """Abort a request that goes on elsewhere, and drop what still comes of it: all that the
        wire brings before the engine has answered."""
        self.leaving[request_id] += 1
        self.wire.send(encode(AbortRequest(request_id)))
        self.wire.call_between_steps(lambda: self._has_left(request_id))

    def _has_left(self, request_id: str) -> None:
        self.leaving[request_id] -= 1
        if not self.leaving[request_id]:
            del self.leaving[request_id]

    @property
    def num_branches(self) -> int:
        """Of its requests, those that have not ended."""
        return sum(len(request.branches) for request in self.requests.values())


class Seats:
    """By replica. Invariant: a request is in at most one seat."""

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
        """The seat of a replica that takes requests."""
        return self._seats.get(replica)

    def add(self, replica: str, wire: Wire) -> None:
        """A replica takes requests, and has none."""
        self._seats[replica] = Seat(wire)

    def remove(self, replica: str) -> Seat | None:
        """It takes no more; what it had is in no seat from now on."""
        seat = self._seats.pop(replica, None)
        if seat is not None:
            for request_id in seat.requests:
                del self._places[request_id]
        return seat

    def clear(self) -> None:
        """No replica takes requests."""
        self._seats.clear()
        self._places.clear()

    def put(self, request: OpenRequest, replica: str) -> Seat:
        """A request is sent to a replica, whose seat is returned."""
        seat = self._seats[replica]
        assert request.request_id not in self._places, "it is in a seat"
        seat.requests[request.request_id] = request
        self._places[request.request_id] = replica
        return seat

    def take(self, request_id: str) -> None:
        """It is computed no more where it was. Nothing happens for one that is in no seat."""
        replica = self._places.pop(request_id, None)
        if replica is not None:
            seat = self._seats[replica]
            del seat.requests[request_id]
            seat.begun.discard(request_id)

    def of(self, request_id: str) -> Seat | None:
        """The seat of a request."""
        replica = self._places.get(request_id)
        return None if replica is None else self._seats[replica]

    def where(self, request_id: str) -> str | None:
        """The replica of a request."""
        return self._places.get(request_id)
