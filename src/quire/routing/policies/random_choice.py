"""Routing policy: a random replica, all equally likely."""

import random

from quire.routing.candidates import Candidates
from quire.routing.policy import RoutingPolicy
from quire.routing.replica import Replica


class RandomChoice(RoutingPolicy):
    """Chooses at random; equal seeds give equal choices."""

    def __init__(self, seed: float = 0) -> None:
        self._random = random.Random(int(seed))

    def choose(self, candidates: Candidates) -> Replica:
        return self._random.choice(candidates.replicas)
