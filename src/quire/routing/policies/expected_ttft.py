"""Routing policy: the replica with the shortest expected time to first token.

A replica's cost model predicts the time as the sum of two parts: the uncached prompts that wait
there, then the uncached part of the new prompt. Two costs to other requests are added:

- The uncached part of the new prompt counts a second time, since later requests wait for it. If a
  share b of the replicas computes prompts, its weight is own_weight * b / (1 - b), because the wait
  in a queue grows in this way with utilization. It counts at the mean speed of the fleet, since a
  second of a slow replica costs others less. So a request goes to the replica with the longest
  prefix if its wait there is at most a fixed multiple of the time that the prefix saves, whatever
  the loads of the other replicas.
- Sequences that generate together slow each other down. The average generation time of a request,
  times the relative increase of the replica's step time, counts `decode_weight` times.

If a replica has more sequences than max_num_seqs, their wait to join the batch counts in full.
"""

import math

from quire.routing.candidates import Candidates
from quire.routing.policy import RoutingPolicy, at_least
from quire.routing.replica import Replica

MOST_BUSY = 0.8
"""A larger share of busy replicas counts as this share."""


class ExpectedTTFT(RoutingPolicy):
    """Minimizes, in seconds: `expected_delay_s` of the replica + prefill time of the prompt there +
    weight * prefill time at the fleet's mean speed.

    Of the replicas with equal speed and equal cached prefix, only the one with the least delay can
    be the best. So the search takes no longer with more replicas.
    """

    def __init__(self, own_weight: float = 2.0, decode_weight: float = 0.01) -> None:
        """Raises ConfigurationError for a weight below 0."""
        self.own_weight = at_least("own_weight", own_weight, 0.0)
        self.decode_weight = at_least("decode_weight", decode_weight, 0.0)

    def weight(self, candidates: Candidates) -> float:
        """Weight of a second that the prompt takes from other requests."""
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

    def expected_delay_s(self, replica: Replica, now_s: float, mean_decode_s: float) -> float:
        beside = self.decode_weight * replica.decode_ratio + replica.excess
        return replica.wait_s(now_s) + mean_decode_s * beside
