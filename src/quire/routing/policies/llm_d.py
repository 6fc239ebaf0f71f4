"""Routing policy of llm-d's scheduler, for comparison: prefer the cached prefix until saturated.

The replica that has cached most of the prompt gets the request, unless its queue is more than
`max_wait_s` seconds longer than the shortest queue. Otherwise the request goes to the replica that
would then have the fewest uncached prompt tokens to compute.
"""

from quire.routing.candidates import Candidates
from quire.routing.policy import RoutingPolicy, at_least
from quire.routing.replica import Replica


class LlmD(RoutingPolicy):
    """Prefers the replica that has most of the prompt cached (the holder), unless it is
    saturated."""

    def __init__(self, match_threshold: float = 0.8, max_wait_s: float = 2.0) -> None:
        """Raises ConfigurationError for an option below 0."""
        #: The holder is preferred if it has cached at least this share of the prompt.
        self.match_threshold = at_least("match_threshold", match_threshold, 0.0)
        #: Seconds by which the holder's queue may exceed the shortest queue.
        self.max_wait_s = at_least("max_wait_s", max_wait_s, 0.0)

    def choose(self, candidates: Candidates) -> Replica:
        replicas = candidates.replicas
        best = min(candidates.holders(), key=_tokens)
        num_cached, length = candidates.num_cached_tokens(best), candidates.request
        coldest_s = min(replica.prefill_s for replica in replicas)
        is_saturated = best.prefill_s - coldest_s > self.max_wait_s
        if num_cached >= self.match_threshold * length.num_prompt_tokens and not is_saturated:
            return best
        return min(
            replicas,
            key=lambda replica: (
                replica.num_uncached_tokens - candidates.num_cached_tokens(replica),
                replica.num_requests,
                replica.index,
            ),
        )


def _tokens(replica: Replica) -> tuple[int, int, int]:
    return replica.num_uncached_tokens, replica.num_requests, replica.index
