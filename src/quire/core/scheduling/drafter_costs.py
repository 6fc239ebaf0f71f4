"""Predicts how long a drafter takes.

One run makes the next draft of all rows; the runs follow one another. The costs are measured at
start-up. Then a factor follows the measured times. Reads no clock.
"""

from collections.abc import Sequence
from dataclasses import dataclass

HANDOVER_S = 1e-4
"""The seconds that it takes to plan drafts of a drafter and to add them to a plan."""

RATE = 0.1
"""The share of an error by which the factor is corrected."""

MOST_SURPRISE = 0.5
"""An error is clipped to this share of the prediction, since a time may be far too long by
accident, but never far too short."""

LEAST_FACTOR, MOST_FACTOR = 0.25, 8.0

RECOVERY = 1e-3
"""The share of the way back to 1 that the factor takes at each plan without drafting. So drafting
that was slow for a while is tried again."""


@dataclass(slots=True)
class DrafterCosts:
    """The seconds of a drafter's runs: run_s + row_s * rows for each run, token_s for each token
    that a row catches up on.

    Drafts also take HANDOVER_S, which is no part of the measured times.
    """

    run_s: float
    row_s: float
    token_s: float
    factor: float = 1.0

    def predict_s(self, runs: Sequence[int], num_missing: int) -> float:
        """The seconds of runs with these numbers of rows, and of num_missing tokens to catch up
        on."""
        return HANDOVER_S * bool(runs) + self._own_s(runs, num_missing)

    def _own_s(self, runs: Sequence[int], num_missing: int) -> float:
        own_s = len(runs) * self.run_s + sum(runs) * self.row_s + num_missing * self.token_s
        return self.factor * own_s

    def run_s_of(self, num_rows: int) -> float:
        """The seconds of one further run of num_rows rows."""
        return self._own_s((num_rows,), 0)

    def observe(self, runs: Sequence[int], num_missing: int, seconds: float) -> None:
        """Learn from a measured time."""
        predicted_s = self._own_s(runs, num_missing)
        if predicted_s <= 0:
            return
        error = max(-MOST_SURPRISE, min(MOST_SURPRISE, seconds / predicted_s - 1))
        self.factor = min(MOST_FACTOR, max(LEAST_FACTOR, self.factor * (1 + RATE * error)))

    def recover(self) -> None:
        """Forget a little of what was learned, since nothing is learned while nothing is
        drafted."""
        self.factor += RECOVERY * (1 - self.factor)
