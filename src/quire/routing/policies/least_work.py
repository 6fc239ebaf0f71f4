"""The replica with the least work; what is cached where does not count."""

from quire.routing.candidates import EVERYONE, Candidates
from quire.routing.policy import RoutingPolicy
from quire.routing.replica import Replica


class LeastWork(RoutingPolicy):
    """The least time until the prompts that are there are computed; equal ones in turn."""

    def choose(self, candidates: Candidates) -> Replica:
        found = candidates.least(EVERYONE)
        assert found is not None, "no replica accepts requests"
        return candidates.replica(found.replica_index)
