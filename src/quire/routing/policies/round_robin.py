"""Routing policy: each replica in turn, whatever its load and cache."""

from quire.routing.candidates import Candidates
from quire.routing.policy import RoutingPolicy
from quire.routing.replica import Replica


class RoundRobin(RoutingPolicy):
    """Chooses the replica with the lowest index above that of the last choice; if there is none,
    the replica with the lowest index."""

    def __init__(self) -> None:
        self._last = -1

    def choose(self, candidates: Candidates) -> Replica:
        replicas = candidates.replicas
        later = (replica for replica in replicas if replica.index > self._last)
        chosen = next(later, replicas[0])
        self._last = chosen.index
        return chosen
