"""Policy: the replica with the least work, whatever it has cached."""

from quire.routing.candidates import EVERYONE, Candidates
from quire.routing.policy import RoutingPolicy
from quire.routing.replica import Replica


class LeastWork(RoutingPolicy):
    """Chooses the replica that has computed its present prompts first. Equal replicas take
    turns."""

    def choose(self, candidates: Candidates) -> Replica:
        found = candidates.least(EVERYONE)
        assert found is not None, "no replica accepts requests"
        return candidates.replica(found.replica_index)
