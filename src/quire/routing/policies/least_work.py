"""Routing policy: the replica with the least pending prefill work, whatever it has cached."""

from quire.routing.candidates import EVERYONE, Candidates
from quire.routing.policy import RoutingPolicy
from quire.routing.replica import Replica


class LeastWork(RoutingPolicy):
    """Chooses the replica that will first have computed its pending prompts. Equal replicas are
    chosen in turn."""

    def choose(self, candidates: Candidates) -> Replica:
        found = candidates.least(EVERYONE)
        assert found is not None, "no replica accepts requests"
        return candidates.replica(found.replica_index)
