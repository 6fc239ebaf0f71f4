"""The replica with the shortest expected time to first token.

The time is predicted by each replica's cost model: its uncached prompts in flight, slowed down by
what generates there, and then the rest of the prompt itself. That rest counts `own_weight` times
more: the replica computes it for nobody else, so requests that come later wait for it, too.
"""

from quire.routing.candidates import Candidates
from quire.routing.policy import RoutingPolicy, at_least
from quire.routing.replica import Replica


class ExpectedTTFT(RoutingPolicy):
    """The least wait + (1 + own_weight) * own prefill, in seconds."""

    def __init__(self, own_weight: float = 1.0) -> None:
        """Raises ConfigurationError for a weight below 0."""
        self.own_weight = at_least("own_weight", own_weight, 0.0)

    def choose(self, candidates: Candidates) -> Replica:
        weight = 1.0 + self.own_weight
        return min(
            candidates.replicas,
            key=lambda replica: (
                replica.wait_s + weight * candidates.prefill_s(replica),
                replica.num_requests,
                replica.index,
            ),
        )
