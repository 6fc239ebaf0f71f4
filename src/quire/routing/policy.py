"""What a routing policy is.

It chooses the replica of one request. A new one is a class in a file of its own:

    class FewestRequests(RoutingPolicy):
        def choose(self, candidates: Candidates) -> Replica:
            return min(candidates.replicas, key=lambda replica: replica.num_requests)

    ROUTING_POLICIES["fewest_requests"] = FewestRequests

It may keep state of its own. `ReplicaRouter` keeps the load of each replica and what is cached
where. One object serves one router.
"""

from abc import ABC, abstractmethod

from quire.errors import ConfigurationError
from quire.routing.candidates import Candidates
from quire.routing.replica import Replica


class RoutingPolicy(ABC):
    """Chooses among the replicas that accept requests."""

    @abstractmethod
    def choose(self, candidates: Candidates) -> Replica:
        """One of `candidates.replicas`. Ties are its own to break, and the same way each time."""

    def standing_s(self, replica: Replica, now_s: float, mean_decode_s: float) -> float:
        """What a request meets at this replica whatever its prompt is, in seconds: the order that
        `candidates.least` finds the first of. At least 0.

        Read when the replica's load has changed, and of a few others with each request.
        mean_decode_s: how long requests generate.
        """
        return replica.wait_s(now_s)


def at_least(name: str, value: float, least: float) -> float:
    """value, an option of a policy. Raises ConfigurationError below `least`, or where it is no
    number."""
    if not value >= least:
        raise ConfigurationError(f"{name} is {value}, but must be at least {least}")
    return value
