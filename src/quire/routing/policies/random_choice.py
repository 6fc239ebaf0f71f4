"""Policy: a random replica, all equally likely."""

import random

from quire.routing.candidates import Candidates
from quire.routing.policy import RoutingPolicy
from quire.routing.replica import Replica


class RandomChoice(RoutingPolicy):
    """Repeats its choices for the same seed."""

    def __init__(self, seed: float = 0) -> None:
        self._random = random.Random(int(seed))

    def choose(self, candidates: Candidates) -> Replica:
        return self._random.choice(candidates.replicas)
