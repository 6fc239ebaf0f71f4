"""The replica with the least work; what is cached where does not count."""

from quire.routing.candidates import Candidates
from quire.routing.policy import RoutingPolicy
from quire.routing.replica import Replica


class LeastWork(RoutingPolicy):
    """The least time until the prompts that are there are computed; then the fewest requests."""

    def choose(self, candidates: Candidates) -> Replica:
        return min(candidates.replicas, key=work)


def work(replica: Replica) -> tuple[float, int, int]:
    """What orders replicas by their work."""
    return replica.wait_s, replica.num_requests, replica.index
