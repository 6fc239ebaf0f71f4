"""Tracks the replicas of a fleet that are connected, and which replica computes which request.

Used by `fleet_dispatcher` and `isolated_trials`.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Protocol

from quire.engine_client.messages import AbortRequest
from quire.engine_client.request_book import OpenRequest
from quire.ipc import encode


class Wire(Protocol):
    """The connection to an engine process; implemented by `link.EngineLink`."""

    def send(self, frame: bytes | Iterator[bytes]) -> None:
        """Send an encoded message, or several."""
        ...

    def call_between_steps(self, call: Callable[[], None]) -> None:
        """Call `call` in this process, when the engine's process reports that it is between two
        steps and has read all messages sent so far. If that process dies first, `call` is never
        called."""
        ...


class ConnectedReplica:
    """The connection to a replica, and the open requests that were sent to it."""

    def __init__(self, wire: Wire) -> None:
        #: The connection to the replica.
        self.wire = wire
        #: The replica's requests by id, in the order in which they were sent.
        self.requests: dict[str, OpenRequest] = {}
        #: Ids of the replica's requests for which it has sent no token yet.
        self.without_tokens: set[str] = set()
        #: Maps the id of each request that was moved away to the number of aborts that the engine
        #: has not handled yet. Until it has, the request's outputs are stale, even if the request
        #: has come back.
        self.leaving: Counter[str] = Counter()
        #: Whether the replica is being drained and gets no new requests.
        self.is_closed = False
        #: Whether the replica has stopped answering; it gets no new requests until it answers.
        self.is_silent = False

    @property
    def accepts(self) -> bool:
        """Whether the replica may get new requests."""
        return not (self.is_closed or self.is_silent)

    def abort_moved(self, request_id: str) -> None:
        """Abort a request that now runs in another replica. Its outputs that arrive before the
        engine has handled the abort are dropped."""
        self.leaving[request_id] += 1
        self.wire.send(encode(AbortRequest(request_id)))
        self.wire.call_between_steps(lambda: self._on_abort_handled(request_id))

    def _on_abort_handled(self, request_id: str) -> None:
        self.leaving[request_id] -= 1
        if not self.leaving[request_id]:
            del self.leaving[request_id]

    @property
    def num_branches(self) -> int:
        """The number of open branches of the replica's requests."""
        return sum(len(request.branches) for request in self.requests.values())


class ConnectedReplicas:
    """The connected replicas by name. Invariant: a request is assigned to at most one replica."""

    def __init__(self) -> None:
        self._replicas: dict[str, ConnectedReplica] = {}
        #: Maps the id of each assigned request to the name of its replica.
        self._names: dict[str, str] = {}

    def __iter__(self) -> Iterator[tuple[str, ConnectedReplica]]:
        return iter(self._replicas.items())

    def __contains__(self, name: str) -> bool:
        return name in self._replicas

    def get(self, name: str) -> ConnectedReplica | None:
        """Find a replica by name; None means that it is not connected."""
        return self._replicas.get(name)

    def add(self, name: str, wire: Wire) -> None:
        """Add a replica without requests. It takes requests over `wire`."""
        self._replicas[name] = ConnectedReplica(wire)

    def remove(self, name: str) -> ConnectedReplica | None:
        """Remove a replica. Its requests are assigned to no replica from now on."""
        removed = self._replicas.pop(name, None)
        if removed is not None:
            for request_id in removed.requests:
                del self._names[request_id]
        return removed

    def clear(self) -> None:
        """Remove all replicas."""
        self._replicas.clear()
        self._names.clear()

    def assign(self, request: OpenRequest, name: str) -> ConnectedReplica:
        """Record that a request is sent to the replica of this name. Returns the replica."""
        replica = self._replicas[name]
        assert request.request_id not in self._names, "it is assigned already"
        replica.requests[request.request_id] = request
        replica.without_tokens.add(request.request_id)
        self._names[request.request_id] = name
        return replica

    def unassign(self, request_id: str) -> None:
        """Remove a request from its replica, if it is assigned to one."""
        name = self._names.pop(request_id, None)
        if name is not None:
            replica = self._replicas[name]
            del replica.requests[request_id]
            replica.without_tokens.discard(request_id)

    def replica_of(self, request_id: str) -> ConnectedReplica | None:
        """The replica that a request is assigned to, or None."""
        name = self._names.get(request_id)
        return None if name is None else self._replicas[name]

    def name_for(self, request_id: str) -> str | None:
        """The name of the replica that a request is assigned to, or None."""
        return self._names.get(request_id)
