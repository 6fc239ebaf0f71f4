"""Tries suspects one after the other, each alone in an engine.

The engine of the trials takes nothing else: one that has nothing to do, or the one with the fewest
requests, which go on elsewhere. A suspect that passes goes on elsewhere, too, so the next one is
alone again: if the engine dies, there is no other request that may have done it. Where a single
engine is left and busy, the trials wait for another one to come, and are made in company after
PATIENCE_S. Called by `fleet_dispatcher`.
"""

from collections.abc import Callable
from typing import Protocol

from quire.cluster.seats import Seats
from quire.cluster.suspects import Suspects
from quire.engine_client.recovery import OpenRequest

PATIENCE_S = 5.0


class TrialMoves(Protocol):
    """What the trials have done: `FleetDispatcher`."""

    def send_to(self, request: OpenRequest, replica: str) -> None:
        """Send a request to a replica."""
        ...

    def move(self, request: OpenRequest) -> None:
        """Have a request go on in another replica, if any takes it."""
        ...

    def set_trial_ground(self, replica: str, *, is_on: bool) -> None:
        """Whether a replica takes suspects only. When that begins, its requests go on elsewhere."""
        ...


class Trials:
    """Invariant: while a suspect is on trial, it is in `ground`."""

    def __init__(self, seats: Seats, moves: TrialMoves, clock: Callable[[], float]) -> None:
        """clock: seconds from any fixed point."""
        self.suspects = Suspects()
        self.ground: str | None = None
        self._seats = seats
        self._moves = moves
        self._clock = clock
        self._since_s: float | None = None  # the first suspect waits for an engine

    @property
    def is_stuck(self) -> bool:
        """Whether suspects wait for an engine; `go_on` is to be called now and then."""
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
        """Tokens of the request on trial came."""
        if self.suspects.note_output(request):
            self._moves.move(request)
            self.go_on()

    def forget(self, request: OpenRequest) -> None:
        """A request has ended, or its client has left. With it an engine may have become empty,
        from which no message comes by itself."""
        if self.suspects.forget(request) or self.is_stuck:
            self.go_on()

    def _has_ground(self) -> bool:
        seat = None if self.ground is None else self._seats.get(self.ground)
        if seat is not None and seat.accepts:
            return True
        self.ground = None  # gone, or about to be
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
        if not loads[name] or len(loads) > 1:
            return name
        now_s = self._clock()
        if self._since_s is None:
            self._since_s = now_s
        return name if now_s - self._since_s >= PATIENCE_S else None

    def _end(self) -> None:
        """No suspect is left."""
        self._since_s = None
        if self.ground is not None:
            ground, self.ground = self.ground, None
            if ground in self._seats:
                self._moves.set_trial_ground(ground, is_on=False)
