"""The replica with the longest cached prefix, whatever its load: a bound to compare with.

Where all prompts begin alike, one replica gets them all.
"""

from quire.routing.candidates import Candidates
from quire.routing.policy import RoutingPolicy
from quire.routing.replica import Replica


class LongestMatch(RoutingPolicy):
    """Of those with the longest prefix, the one with the least work."""

    def choose(self, candidates: Candidates) -> Replica:
        return min(
            candidates.holders(),
            key=lambda replica: (candidates.wait_s(replica), replica.num_requests, replica.index),
        )
