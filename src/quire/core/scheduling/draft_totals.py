"""Sums of the counts of drafts over all proposers, for metrics, logs and benchmarks."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any


@dataclass(frozen=True, slots=True)
class DraftTotals:
    """Counts of drafts by their position after a row's token.

    Invariant: both tuples have an entry for each position at which a draft was verified. A row of a
    step has a draft at position 0 if it has any.
    """

    #: Number of drafts that steps verified, for each position.
    verified: tuple[int, ...] = ()
    #: Number of drafts that equalled the sampled tokens, for each position.
    accepted: tuple[int, ...] = ()

    @classmethod
    def of(cls, drafts: Mapping[str, Any]) -> "DraftTotals":
        """The sums of `Drafting.as_dict`; zero for an empty mapping."""
        counts = drafts.get("by_proposer", {}).values()
        verified = _sums(found["verified"] for found in counts)
        accepted = _sums(found["accepted"] for found in counts)
        return cls(verified, accepted + (0,) * (len(verified) - len(accepted)))

    @property
    def num_rows(self) -> int:
        """Number of rows of steps that had drafts."""
        return self.verified[0] if self.verified else 0

    @property
    def num_verified(self) -> int:
        """Number of drafts that steps verified."""
        return sum(self.verified)

    @property
    def num_accepted(self) -> int:
        """Number of drafts that equalled the sampled tokens."""
        return sum(self.accepted)

    @property
    def accepted_share(self) -> float:
        """Share of the verified drafts that were accepted; 0 without drafts."""
        return self.num_accepted / self.num_verified if self.num_verified else 0.0

    @property
    def tokens_a_step(self) -> float:
        """Mean number of tokens that a sequence with drafts got from a step; 1 without drafts."""
        return 1 + self.num_accepted / self.num_rows if self.num_rows else 1.0

    def since(self, earlier: "DraftTotals") -> "DraftTotals":
        """The counts that have come after the earlier ones of the same engine."""
        return DraftTotals(
            _differences(self.verified, earlier.verified),
            _differences(self.accepted, earlier.accepted),
        )


def _sums(counts: Iterable[Iterable[int]]) -> tuple[int, ...]:
    return tuple(map(sum, zip_longest(*counts, fillvalue=0)))


def _differences(later: Iterable[int], earlier: Iterable[int]) -> tuple[int, ...]:
    pairs = zip_longest(later, earlier, fillvalue=0)
    return tuple(after - before for after, before in pairs)
