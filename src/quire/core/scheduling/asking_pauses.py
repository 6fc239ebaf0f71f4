"""Decides how often proposers are asked for drafts while asking them is in vain.

Asking takes time, which a tiny model's steps would notice. Pauses are counted in steps and not in
seconds, so a busy machine does not make them shorter. Called by `drafts`.
"""

from quire.core.scheduling.cost_model import SHORTEST_S
from quire.core.scheduling.pacing import StepBudget

ASKING_S = 60e-6
"""About the seconds that asking for drafts takes, and again for each row (Zen 3, 2026-11)."""

ASKING_SHARE = 0.005
"""Where asking for drafts is in vain for long, it takes about this share of the time. A row of a
large model is then asked in each step. A tiny model, or a crowd that has rarely use for drafts, is
asked now and then."""

NUM_TRIES = 3
"""Number of plans in a row that may ask in vain without a pause behind each. Text that repeats
other text in parts is asked about in each step."""

MOST_DOUBLINGS = 7
"""Pauses double up to two to this power, less one."""


class AskingPauses:
    """The plans that ask for no drafts.

    Invariant: 0 <= `num_left` <= 2**MOST_DOUBLINGS.
    """

    def __init__(self) -> None:
        #: The number of plans that ask for no drafts, from the one that is being planned on.
        self.num_left = 0
        # The number of plans in a row that asked in vain. Accepted drafts lower it.
        self._num_vain = 0

    def begin_plan(self) -> None:
        """Begin the next plan."""
        self.num_left = max(0, self.num_left - 1)

    def pause(self, budget: StepBudget, num_asked: int) -> None:
        """Count this plan, which has asked in vain for num_asked rows. Behind NUM_TRIES such plans,
        ask for no drafts in the next plan, and so on in the next 3, 7, ... plans, up to the number
        that makes asking cheap."""
        step_s = 0.0 if budget.model is None else budget.model.predict_s(budget.load)
        if step_s < SHORTEST_S:
            return  # the time of a step is unknown, and so is what asking costs beside it
        self._num_vain = min(self._num_vain + 1, NUM_TRIES + MOST_DOUBLINGS)
        wanted = (1 << max(0, self._num_vain - NUM_TRIES)) - 1
        asking_s = (1 + num_asked) * ASKING_S
        self.num_left = 1 + min(wanted, int(asking_s / (ASKING_SHARE * step_s)))

    def shorten(self) -> None:
        """Make the next pauses shorter, since drafts were accepted."""
        self._num_vain = max(0, self._num_vain - NUM_TRIES)
