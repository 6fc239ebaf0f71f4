"""The replica with the shortest expected time to first token.

The time is predicted by the cost models of the replicas: the uncached prompts in flight there, and
then the rest of the prompt itself. Two things that cost others are added:

- The rest of the prompt counts `own_weight` times more. Requests that come later wait for it, and
  it takes the place of what is cached. So a request goes to the replica with the longest prefix as
  long as that makes it wait for at most own_weight times what the prefix saves, each request judged
  by itself, whatever the loads of the rest of the fleet.
- Sequences that generate together slow each other down. How long requests generate, times by how
  much steps are longer there, counts `decode_weight` times.

Where more sequences are placed than run at once, their wait for a row counts in full.
"""

import math

from quire.routing.candidates import Candidates
from quire.routing.policy import RoutingPolicy, at_least
from quire.routing.replica import Replica


class ExpectedTTFT(RoutingPolicy):
    """The least standing + (1 + own_weight) * own prefill, in seconds.

    A search over prefixes, longest first: of the holders of each, only the one with the least
    standing can be the best. Its cost does not grow with the number of replicas.
    """

    def __init__(self, own_weight: float = 6.0, decode_weight: float = 0.01) -> None:
        """Raises ConfigurationError for a weight below 0."""
        self.own_weight = at_least("own_weight", own_weight, 0.0)
        self.decode_weight = at_least("decode_weight", decode_weight, 0.0)

    def choose(self, candidates: Candidates) -> Replica:
        weight, num_tokens = 1.0 + self.own_weight, candidates.request.num_prompt_tokens
        best_s, best = math.inf, -1
        for num_cached, holders in candidates.prefixes():
            for speed, members in candidates.speeds().items():
                own_s = weight * speed.seconds(num_tokens, num_cached)
                found = candidates.least(holders & members, best_s - own_s)
                if found is not None:
                    best_s, best = found.seconds + own_s, found.replica_index
        return candidates.replica(best)

    def standing_s(self, replica: Replica, now_s: float, mean_decode_s: float) -> float:
        beside = self.decode_weight * replica.decode_ratio + replica.excess
        return replica.wait_s(now_s) + mean_decode_s * beside
