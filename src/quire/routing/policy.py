"""The interface of routing policies, which choose a replica for each request.

A new policy is a class in a file of its own:

    class FewestRequests(RoutingPolicy):
        def choose(self, candidates: Candidates) -> Replica:
            return min(candidates.replicas, key=lambda replica: replica.num_requests)

    ROUTING_POLICIES["fewest_requests"] = FewestRequests

A policy may keep state of its own. `ReplicaRouter` keeps the load of each replica and where
prefixes are cached. A policy object serves one router.
"""

from abc import ABC, abstractmethod

from quire.errors import ConfigurationError
from quire.routing.candidates import Candidates
from quire.routing.replica import Replica


class RoutingPolicy(ABC):
    """Chooses among the replicas that accept requests."""

    @abstractmethod
    def choose(self, candidates: Candidates) -> Replica:
        """Choose from `candidates.replicas`. The policy breaks ties itself, always in the same
        way."""

    def expected_delay_s(self, replica: Replica, now_s: float, mean_decode_s: float) -> float:
        """Seconds of delay that any request meets at this replica, whatever its prompt; at least 0.
        `candidates.least` finds the replica for which this is least.

        It is read when the replica's load changes; each request also rereads it for a few replicas.
        `mean_decode_s` is the average time that requests generate.
        """
        return replica.wait_s(now_s)


def at_least(name: str, value: float, least: float) -> float:
    """Return `value`, an option of a policy. Raises ConfigurationError if it is below `least` or
    not a number."""
    if not value >= least:
        raise ConfigurationError(f"{name} is {value}, but must be at least {least}")
    return value
