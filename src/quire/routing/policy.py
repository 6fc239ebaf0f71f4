"""The interface of routing policies, which choose a replica for each request.

A new policy is a class in a file of its own:

    class FewestRequests(RoutingPolicy):
        def choose(self, candidates: Candidates) -> Replica:
            return min(candidates.replicas, key=lambda replica: replica.num_requests)

    ROUTING_POLICIES.register("fewest_requests", FewestRequests)

A policy may keep its own state. `ReplicaRouter` tracks the load and the cached prefixes of each
replica. A policy object serves one router.
"""

from abc import ABC, abstractmethod

from quire.errors import ConfigurationError
from quire.routing.candidates import Candidates
from quire.routing.replica import Replica


class RoutingPolicy(ABC):
    """Chooses among the replicas that accept requests."""

    @abstractmethod
    def choose(self, candidates: Candidates) -> Replica:
        """Choose one of `candidates.replicas`. Ties must be broken deterministically."""

    def expected_delay_s(self, replica: Replica, now_s: float, mean_decode_s: float) -> float:
        """Expected delay of a request at this replica, in seconds, without the time for its own
        prompt; at least 0. `candidates.least` finds the replica with the least expected delay.

        The router calls it when the replica's load changes, and for a few replicas with each
        request. `mean_decode_s` is the average time from a request's first token to its end.
        """
        return replica.wait_s(now_s)


def at_least(name: str, value: float, least: float) -> float:
    """Return `value`, an option of a policy. Raises ConfigurationError if it is below `least` or
    not a number."""
    if not value >= least:
        raise ConfigurationError(f"{name} is {value}, but must be at least {least}")
    return value
