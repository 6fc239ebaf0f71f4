"""Routing policy: the replica with the longest cached prefix, whatever its load; for comparison.

If all prompts share a prefix, one replica gets all requests.
"""

from quire.routing.candidates import Candidates
from quire.routing.policy import RoutingPolicy
from quire.routing.replica import Replica


class LongestMatch(RoutingPolicy):
    """Chooses the replica with the least work among those with the longest prefix."""

    def choose(self, candidates: Candidates) -> Replica:
        return min(
            candidates.holders(),
            key=lambda replica: (candidates.wait_s(replica), replica.num_requests, replica.index),
        )
