"""Runs requests suspected of crashing an engine one at a time, each alone in an engine.

The replica of the trials takes no other requests. It is an idle replica, or the replica with the
fewest requests, which are moved to other replicas. A suspect that passes is moved away, too, so the
next suspect is alone again: if the engine dies, no other request can have been the cause. If only
one busy replica is left, the trials wait for another replica. After PATIENCE_S they run beside its
other requests. Called by `fleet_dispatcher`.
"""

from collections.abc import Callable
from typing import Protocol

from quire.cluster.failover.connected_replicas import ConnectedReplicas
from quire.cluster.failover.crash_attribution import CrashAttribution
from quire.engine_client.recovery import OpenRequest

PATIENCE_S = 5.0
"""Seconds for which trials wait for another replica when there is one busy replica."""


class RequestMover(Protocol):
    """Moves requests for the trials; implemented by `FleetDispatcher`."""

    def send_to(self, request: OpenRequest, name: str) -> None:
        """Send a request to the replica of this name."""
        ...

    def move(self, request: OpenRequest) -> None:
        """Move a request to another replica, if any takes it."""
        ...

    def reserve_for_trials(self, name: str, *, is_reserved: bool) -> None:
        """Set whether a replica takes suspects only. When set, its present requests are moved to
        other replicas."""
        ...


class IsolatedTrials:
    """Runs the trials of one fleet. Invariant: a suspect on trial is in the replica `reserved`."""

    def __init__(
        self, replicas: ConnectedReplicas, mover: RequestMover, clock: Callable[[], float]
    ) -> None:
        """`clock` returns seconds from any fixed point."""
        #: The suspects and the evidence against them.
        self.attribution = CrashAttribution()
        #: Name of the replica that is reserved for the trials; None while none is.
        self.reserved: str | None = None
        self._replicas = replicas
        self._mover = mover
        self._clock = clock
        #: Time since which the first suspect waits for a replica; None if none waits.
        self._waiting_since_s: float | None = None

    @property
    def waits_for_replica(self) -> bool:
        """Whether suspects wait for a replica. Then `start_next` has to be called regularly."""
        return self._waiting_since_s is not None

    def start_next(self) -> None:
        """Send the next suspect, if none is on trial and there is a replica for it."""
        if self.attribution.trial is not None:
            return
        if not self.attribution.num_waiting:
            self._release_replica()
            return
        if not self._reserve_replica():
            return
        request = self.attribution.next_trial()
        if request is None:
            self._release_replica()
            return
        assert self.reserved is not None
        self._mover.send_to(request, self.reserved)

    def note_output(self, request: OpenRequest) -> None:
        """Count new tokens of the request on trial."""
        if self.attribution.note_output(request):
            self._mover.move(request)
            self.start_next()

    def remove(self, request: OpenRequest) -> None:
        """Remove a request that has ended or whose client has left. If that leaves a replica empty,
        no message follows, so the next trial is started here."""
        if self.attribution.remove(request) or self.waits_for_replica:
            self.start_next()

    def _reserve_replica(self) -> bool:
        """Keep the replica of the trials, or reserve another. Returns whether there is one."""
        replica = None if self.reserved is None else self._replicas.get(self.reserved)
        if replica is not None and replica.accepts:
            return True
        self.reserved = None  # the replica is gone, or about to end
        chosen = self._choose_replica()
        if chosen is None:
            return False
        self.reserved, self._waiting_since_s = chosen, None
        self._mover.reserve_for_trials(chosen, is_reserved=True)
        return True

    def _choose_replica(self) -> str | None:
        loads = {name: each.num_branches for name, each in self._replicas if each.accepts}
        if not loads:
            return None
        name = min(loads, key=lambda each: (loads[each], each))
        # An idle replica, or one of several, can be emptied at once. A single busy one can't, so
        # wait for another replica first.
        if not loads[name] or len(loads) > 1:
            return name
        now_s = self._clock()
        if self._waiting_since_s is None:
            self._waiting_since_s = now_s
        return name if now_s - self._waiting_since_s >= PATIENCE_S else None

    def _release_replica(self) -> None:
        """Let the replica of the trials take other requests, since no suspect is left."""
        self._waiting_since_s = None
        if self.reserved is not None:
            name, self.reserved = self.reserved, None
            if name in self._replicas:
                self._mover.reserve_for_trials(name, is_reserved=False)
