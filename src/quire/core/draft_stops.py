"""Decides where a drafter stops, from the probabilities that it gives its own drafts.

A drafter computes a probability for each token that it proposes. Drafts with a high probability are
usually accepted, and drafts with a low one are rejected. So the chance of acceptance can be
estimated before a draft is verified. Probabilities fall into a few grades, and the chance is
learned for each grade (`speculation.speculator`). The drafter stops when its next run is expected
to cost more time than it saves.
"""

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

GRADE_BOUNDS = (0.2, 0.4, 0.6, 0.8, 0.9, 0.97)
"""Probabilities from which the next higher grade begins."""

TYPICAL_PROBABILITIES = (0.1, 0.3, 0.5, 0.7, 0.85, 0.935, 0.985)
"""A probability within each grade."""


def grade_of(probability: float) -> int:
    """The grade of a probability, from 0 on."""
    return bisect_right(GRADE_BOUNDS, probability)


class DraftStop(NamedTuple):
    """The rule by which a run of drafts for one row ends."""

    #: For each grade, the chance that a draft of this grade is accepted if all earlier drafts are.
    chances: tuple[float, ...] = TYPICAL_PROBABILITIES
    #: For each grade, the chance that the draft after an accepted draft of this grade is accepted.
    next_chances: tuple[float, ...] = TYPICAL_PROBABILITIES
    #: The drafter stops if its next draft would be accepted with a smaller chance than this.
    least_chance: float = 0.0
    #: The tokens that end the sequence. No draft follows them.
    end_token_ids: frozenset[int] = frozenset()

    def survival(self, probabilities: Sequence[float]) -> tuple[float, ...]:
        """The survival of each draft: the chance that the draft and all drafts before it are
        accepted. `probabilities` are those that the drafter gives its drafts."""
        found: list[float] = []
        product = 1.0
        for probability in probabilities:
            product *= self.chances[grade_of(probability)]
            found.append(product)
        return tuple(found)

    def allows_next(self, token_id: int, probabilities: Sequence[float]) -> bool:
        """Whether the drafter proposes another token. `probabilities` are those of its drafts so
        far, and token_id is the last draft."""
        if token_id in self.end_token_ids:
            return False
        chance = self.next_chances[grade_of(probabilities[-1])]
        return self.survival(probabilities)[-1] * chance >= self.least_chance
