"""Learns how often drafts are accepted, for each kind of guess.

Each kind has two counts for each place behind a row: the number of drafts whose predecessors were
accepted, and how many of these drafts were accepted. Their ratio is the chance of acceptance. The
product of the chances up to a place is the chance to survive to it. A place with few drafts takes
over the chance of the place before. Counts are halved as they grow, to forget old outcomes.
"""

from collections.abc import Hashable

MOST_COUNTED = 64
"""At this count of a place, both of its counts are halved."""

PRIOR_WEIGHT = 2.0
"""The number of verified drafts that the first estimate counts as."""

LOOKS = 64
"""After this number of estimates without an outcome, all counts of the kind are halved. So a kind
of guesses that was once bad is tried again now and then."""


class _Counts:
    """The counts of one kind."""

    __slots__ = ("accepted", "num_looks", "verified")

    def __init__(self) -> None:
        self.verified: list[float] = []
        self.accepted: list[float] = []
        self.num_looks = 0

    def halve(self) -> None:
        self.verified = [count / 2 for count in self.verified]
        self.accepted = [count / 2 for count in self.accepted]


class Survival:
    """Estimates how far the drafts of a guess survive."""

    def __init__(self) -> None:
        self._counts: dict[Hashable, _Counts] = {}

    def estimate(self, kind: Hashable, num_drafts: int, chance: float) -> tuple[float, ...]:
        """For each of num_drafts drafts, the chance that it and all before it are accepted.

        chance: that of a single draft, until it was learned.
        """
        counts = self._counts.get(kind)
        if counts is None:
            counts = self._counts[kind] = _Counts()
        counts.num_looks += 1
        if counts.num_looks > LOOKS:
            counts.num_looks = 0
            counts.halve()
        verified, accepted = counts.verified, counts.accepted
        survival, product = [], 1.0
        num_known = min(num_drafts, len(verified))
        for place in range(num_known):
            chance = (accepted[place] + PRIOR_WEIGHT * chance) / (verified[place] + PRIOR_WEIGHT)
            product *= chance
            survival.append(product)
        for _ in range(num_drafts - num_known):
            product *= chance
            survival.append(product)
        return tuple(survival)

    def learn(self, kind: Hashable, num_verified: int, num_accepted: int) -> None:
        """Learn the outcome of a row's drafts."""
        counts = self._counts.setdefault(kind, _Counts())
        counts.num_looks = 0
        # The first rejected draft is counted, but not the drafts behind it, which follow an error.
        num_known = min(num_verified, num_accepted + 1)
        missing = num_known - len(counts.verified)
        counts.verified.extend([0.0] * missing)
        counts.accepted.extend([0.0] * missing)
        for place in range(num_known):
            counts.verified[place] += 1
            counts.accepted[place] += place < num_accepted
            if counts.verified[place] >= MOST_COUNTED:
                counts.verified[place] /= 2
                counts.accepted[place] /= 2
