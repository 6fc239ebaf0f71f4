"""The replica with the shortest expected time to first token.

The time is predicted by the cost models of the replicas: the uncached prompts in flight there, and
then the rest of the prompt itself. Two things that cost others are added:

- The rest of the prompt counts again, since requests that come later wait for it, too, and the more
  the busier the fleet is: own_weight * b / (1 - b) times, where a share b of the replicas computes
  prompts, as the wait at a queue grows with its utilization. It counts as what it takes at the
  fleet's mean speed, for a second of a slow replica keeps less from others. So a request goes to
  the replica with the longest prefix as long as it waits no longer than so many times what the
  prefix saves. Each request is judged by itself, whatever the most and the least loaded replicas
  are.
- Sequences that generate together slow each other down. How long requests generate, times by how
  much steps are longer there, counts `decode_weight` times.

Where more sequences are placed than run at once, their wait for a row counts in full.
"""

import math

from quire.routing.candidates import Candidates
from quire.routing.policy import RoutingPolicy, at_least
from quire.routing.replica import Replica

MOST_BUSY = 0.8
"""A larger share of busy replicas counts as this one."""


class ExpectedTTFT(RoutingPolicy):
    """The least standing + own prefill + weight * mean prefill, in seconds.

    A search over prefixes, longest first: of the holders of each, only the one with the least
    standing can be the best. Its cost does not grow with the number of replicas.
    """

    def __init__(self, own_weight: float = 2.0, decode_weight: float = 0.01) -> None:
        """Raises ConfigurationError for a weight below 0."""
        self.own_weight = at_least("own_weight", own_weight, 0.0)
        self.decode_weight = at_least("decode_weight", decode_weight, 0.0)

    def weight(self, candidates: Candidates) -> float:
        """How much a second counts that the prompt takes from others."""
        busy = min(candidates.busy_share, MOST_BUSY)
        return self.own_weight * busy / (1.0 - busy)

    def choose(self, candidates: Candidates) -> Replica:
        weight, num_tokens = self.weight(candidates), candidates.request.num_prompt_tokens
        best_s, best, mean = math.inf, -1, candidates.mean_speed
        for num_cached, holders in candidates.prefixes():
            taken_s = weight * mean.seconds(num_tokens, num_cached)
            for speed, members in candidates.speeds().items():
                own_s = taken_s + speed.seconds(num_tokens, num_cached)
                found = candidates.least(holders & members, best_s - own_s)
                if found is not None:
                    best_s, best = found.seconds + own_s, found.replica_index
        return candidates.replica(best)

    def standing_s(self, replica: Replica, now_s: float, mean_decode_s: float) -> float:
        beside = self.decode_weight * replica.decode_ratio + replica.excess
        return replica.wait_s(now_s) + mean_decode_s * beside
