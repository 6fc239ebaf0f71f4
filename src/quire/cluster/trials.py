"""Runs requests suspected of killing an engine one at a time, each alone in an engine.

The engine of the trials takes no other requests. It is an idle engine, or the engine with the
fewest requests, which are moved to other engines. A suspect that passes is moved away, too, so the
next suspect is alone again: if the engine dies, no other request can have been the cause. If only
one busy engine is left, the trials wait for another engine, and after PATIENCE_S run beside its
other requests. Called by `fleet_dispatcher`.
"""

from collections.abc import Callable
from typing import Protocol

from quire.cluster.seats import Seats
from quire.cluster.suspects import Suspects
from quire.engine_client.recovery import OpenRequest

PATIENCE_S = 5.0


class TrialMoves(Protocol):
    """Moves requests for the trials; implemented by `FleetDispatcher`."""

    def send_to(self, request: OpenRequest, replica: str) -> None:
        """Send a request to a replica."""
        ...

    def move(self, request: OpenRequest) -> None:
        """Move a request to another replica, if any takes it."""
        ...

    def set_trial_ground(self, replica: str, *, is_on: bool) -> None:
        """Set whether a replica takes suspects only. When set, its present requests are moved to
        other replicas."""
        ...


class Trials:
    """Runs the trials of one fleet. Invariant: a suspect on trial is in the replica `ground`."""

    def __init__(self, seats: Seats, moves: TrialMoves, clock: Callable[[], float]) -> None:
        """`clock` returns seconds from any fixed point."""
        self.suspects = Suspects()
        #: Name of the replica in which the trials run; None while none is chosen.
        self.ground: str | None = None
        self._seats = seats
        self._moves = moves
        self._clock = clock
        #: Time since which the first suspect waits for an engine; None if none waits.
        self._since_s: float | None = None

    @property
    def is_stuck(self) -> bool:
        """Whether suspects wait for an engine. Then `go_on` has to be called regularly."""
        return self._since_s is not None

    def go_on(self) -> None:
        """Send the next suspect, if none is on trial and there is an engine for it."""
        if self.suspects.trial is not None:
            return
        if not self.suspects.num_waiting or not self._has_ground():
            if not self.suspects.num_waiting:
                self._end()
            return
        request = self.suspects.next_trial()
        if request is None:
            self._end()
            return
        assert self.ground is not None
        self._moves.send_to(request, self.ground)

    def note_output(self, request: OpenRequest) -> None:
        """Count new tokens of the request on trial."""
        if self.suspects.note_output(request):
            self._moves.move(request)
            self.go_on()

    def forget(self, request: OpenRequest) -> None:
        """Remove a request that has ended or whose client has left. If that leaves an engine empty,
        no message follows, so the next trial is started here."""
        if self.suspects.forget(request) or self.is_stuck:
            self.go_on()

    def _has_ground(self) -> bool:
        seat = None if self.ground is None else self._seats.get(self.ground)
        if seat is not None and seat.accepts:
            return True
        self.ground = None  # the replica is gone, or about to end
        chosen = self._choose()
        if chosen is None:
            return False
        self.ground, self._since_s = chosen, None
        self._moves.set_trial_ground(chosen, is_on=True)
        return True

    def _choose(self) -> str | None:
        loads = {name: seat.num_branches for name, seat in self._seats if seat.accepts}
        if not loads:
            return None
        name = min(loads, key=lambda each: (loads[each], each))
        # An idle replica, or one of several, can be emptied at once. A single busy one can't, so
        # wait for another replica first.
        if not loads[name] or len(loads) > 1:
            return name
        now_s = self._clock()
        if self._since_s is None:
            self._since_s = now_s
        return name if now_s - self._since_s >= PATIENCE_S else None

    def _end(self) -> None:
        """Release the replica of the trials, since no suspect is left."""
        self._since_s = None
        if self.ground is not None:
            ground, self.ground = self.ground, None
            if ground in self._seats:
                self._moves.set_trial_ground(ground, is_on=False)
