"""Routing policy of SGLang's gateway ("cache_aware"), for comparison.

The load of a replica is its number of requests. If the loads are unbalanced, the replica with the
smallest load gets the request. Otherwise the replica with the longest cached prefix gets it, if
that prefix is more than `cache_threshold` of the prompt; else the replica with the smallest load.
The thresholds are the defaults of sgl-model-gateway.
"""

from quire.routing.candidates import Candidates
from quire.routing.policy import RoutingPolicy, at_least
from quire.routing.replica import Replica


class SGLang(RoutingPolicy):
    """Follows the cached prefix unless the loads are unbalanced: the highest exceeds the lowest by
    more than `balance_abs_threshold` and is above `balance_rel_threshold` times the lowest."""

    def __init__(
        self,
        cache_threshold: float = 0.5,
        balance_abs_threshold: float = 32,
        balance_rel_threshold: float = 1.1,
    ) -> None:
        """Raises ConfigurationError for a threshold below 0."""
        self.cache_threshold = at_least("cache_threshold", cache_threshold, 0.0)
        self.balance_abs_threshold = at_least("balance_abs_threshold", balance_abs_threshold, 0.0)
        self.balance_rel_threshold = at_least("balance_rel_threshold", balance_rel_threshold, 0.0)

    def choose(self, candidates: Candidates) -> Replica:
        loads = [replica.num_requests for replica in candidates.replicas]
        lowest, highest = min(loads), max(loads)
        is_unbalanced = (
            highest - lowest > self.balance_abs_threshold
            and highest > self.balance_rel_threshold * lowest
        )
        if not is_unbalanced:
            best = min(candidates.holders(), key=_load)
            share = candidates.num_cached_tokens(best) / candidates.request.num_prompt_tokens
            if share > self.cache_threshold:
                return best
        return min(candidates.replicas, key=_load)


def _load(replica: Replica) -> tuple[int, int]:
    return replica.num_requests, replica.index
