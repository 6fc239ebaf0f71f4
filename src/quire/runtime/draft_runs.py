"""The drafts of rows while a drafter makes them, run by run."""

from quire.core.step import Drafted, DraftOrder
from quire.sampling.host.sampler import NO_TOKEN


class DraftRuns:
    """The drafts that were made for one order.

    Invariant: `token_ids` has at most `order.num_drafts` drafts, and `goes_on` says whether the
    next run makes one more.
    """

    __slots__ = ("_order", "_probabilities", "goes_on", "token_ids")

    def __init__(self, order: DraftOrder) -> None:
        self._order = order
        self._probabilities: list[float] = []
        self.token_ids: list[int] = []
        self.goes_on = order.num_drafts > 0

    def add(self, token_id: int, probability: float) -> None:
        """Add the next draft, with the probability that the drafter gives it. After NO_TOKEN, the
        row gets no further drafts."""
        self.goes_on = False
        if token_id == NO_TOKEN:
            return
        self.token_ids.append(token_id)
        self._probabilities.append(probability)
        if len(self.token_ids) < self._order.num_drafts:
            self.goes_on = self._order.stop.allows_next(token_id, self._probabilities)

    def drafted(self, num_reached_tokens: int) -> Drafted:
        """The drafts as a result. num_reached_tokens: see `Drafted`."""
        return Drafted(tuple(self.token_ids), num_reached_tokens, tuple(self._probabilities))
