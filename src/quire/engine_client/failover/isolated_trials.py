"""Runs requests suspected of crashing an engine one at a time, each alone in an engine.

One replica is reserved for the trials: an idle replica, or the replica with the fewest requests,
which first move to other replicas. A suspect that passes its trial also moves away, so the next
suspect is alone again: if the engine dies, that suspect is the cause. If the only replica is busy,
the trials wait for another replica. After PATIENCE_S they run beside the replica's other requests.
If no other replica takes requests, those that have passed stay beside the next trial, and new ones
wait until the trials are over. Called by `fleet_dispatcher`.
"""

from collections.abc import Callable
from typing import Protocol

from quire.engine_client.failover.connected_replicas import ConnectedReplica, ConnectedReplicas
from quire.engine_client.failover.crash_attribution import CrashAttribution
from quire.engine_client.request_book import OpenRequest

PATIENCE_S = 5.0
"""Seconds for which trials wait for another replica while the only replica is busy."""


class RequestMover(Protocol):
    """Moves requests for the trials; implemented by `FleetDispatcher`."""

    def send_to(self, request: OpenRequest, name: str) -> None:
        """Send a request to the replica of this name."""
        ...

    def move(self, request: OpenRequest) -> None:
        """Move a request to another replica, if any takes it."""
        ...

    def takes_any(self, beside: ConnectedReplica | None = None) -> bool:
        """Whether any replica other than `beside` takes new requests."""
        ...

    def reserve_for_trials(self, name: str, *, is_reserved: bool) -> None:
        """Set whether a replica takes suspects only. If so, its present requests move to other
        replicas."""
        ...


class IsolatedTrials:
    """Runs the trials of one fleet. Invariant: a suspect is sent to the replica `reserved`, which
    stays reserved during its trial unless no other replica takes requests (see
    `CrashAttribution.delays_others`)."""

    def __init__(
        self, replicas: ConnectedReplicas, mover: RequestMover, clock: Callable[[], float]
    ) -> None:
        """`clock` returns seconds from any fixed point."""
        #: The suspects and the evidence against them.
        self.attribution = CrashAttribution()
        #: Name of the replica that is reserved for the trials; None if there is no such replica.
        self.reserved: str | None = None
        #: The replica of the latest trial.
        self._replica: ConnectedReplica | None = None
        self._replicas = replicas
        self._mover = mover
        self._clock = clock
        #: Clock time in seconds when suspects began to wait for a replica; None if no suspect
        #: waits. While they wait, the caller has to call `start_next` regularly.
        self.waiting_since_s: float | None = None

    def run_in(self, replica: ConnectedReplica) -> bool:
        """Whether a trial is running in this replica."""
        return self.attribution.trial is not None and self._replica is replica

    def start_next(self) -> None:
        """Send the next suspect to the reserved replica, unless a trial is running or no replica is
        free."""
        if self.attribution.trial is not None:
            return
        if self.attribution.num_waiting and not self._reserve_replica():
            return
        request = self.attribution.next_trial()  # without suspects, drops all evidence
        if request is None:
            self._release_replica()
            return
        assert self.reserved is not None
        self._replica = self._replicas.get(self.reserved)
        self._mover.send_to(request, self.reserved)
        if not self.attribution.delays_others and not self._mover.takes_any(beside=self._replica):
            self._release_replica()

    def note_output(self, request: OpenRequest) -> None:
        """Note that the request on trial has new tokens. If it has passed, starts the next
        trial."""
        if self.attribution.note_output(request):
            self._mover.move(request)
            self.start_next()

    def remove(self, request: OpenRequest) -> None:
        """Remove a request that was answered, refused or blamed. Starts the next trial, since a
        replica that has become empty sends no message that would start it."""
        if self.attribution.remove(request) or self.waiting_since_s is not None:
            self.start_next()

    def leave(self, request: OpenRequest) -> None:
        """Remove a request whose client has left. Its engine may be in the very step that kills it,
        so its trial lasts until the engine has handled the abort that was sent."""

        def release() -> None:
            if self.attribution.release(request) or self.waiting_since_s is not None:
                self.start_next()

        if request is self.attribution.trial:
            assert self._replica is not None, "the request was sent there"
            self._replica.wire.call_between_steps(release)
        else:
            release()

    def _reserve_replica(self) -> bool:
        """Reserve a replica for the trials if none is reserved. Returns False if none is
        available."""
        replica = None if self.reserved is None else self._replicas.get(self.reserved)
        if replica is not None and replica.accepts:
            return True
        self.reserved = None  # the replica is gone, or about to end
        chosen = self._choose_replica()
        if chosen is None:
            return False
        self.reserved, self.waiting_since_s = chosen, None
        self._mover.reserve_for_trials(chosen, is_reserved=True)
        return True

    def _choose_replica(self) -> str | None:
        loads = {name: each.num_branches for name, each in self._replicas if each.accepts}
        if not loads:
            return None
        name = min(loads, key=lambda each: (loads[each], each))
        # An idle replica is empty, and the requests of one of several replicas can move to the
        # others. A single busy replica can't be emptied, so wait for another replica first.
        if not loads[name] or len(loads) > 1:
            return name
        now_s = self._clock()
        if self.waiting_since_s is None:
            self.waiting_since_s = now_s
        return name if now_s - self.waiting_since_s >= PATIENCE_S else None

    def _release_replica(self) -> None:
        """Let the reserved replica take other requests again, since no suspect is left."""
        self.waiting_since_s = None
        if self.reserved is not None:
            name, self.reserved = self.reserved, None
            if name in self._replicas:
                self._mover.reserve_for_trials(name, is_reserved=False)
