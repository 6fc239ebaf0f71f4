"""The interface of drafters: models, or heads of the model, that propose drafts on the device.

    each plan        change(plan)             the rows have changed
    before a step    draft(orders)            the drafts of some rows, which the step verifies
    after a step     follow(step, hidden)     the step's hidden states, if `needs_hidden`

A drafter has attention layers of its own. Their K and V are in the same blocks as those of the
model: their layers follow the model's in the layout of pages, so that shared, copied and kept
blocks have them, too. A drafter reads the rows' tokens and tables (`batch.RowBatch`), and never
changes the tokens and counts of a row. So a drafter that is wrong, or has wrong K and V, makes
drafts worse, but changes no token. `model_runner` calls drafters; `draft_model` has the first one.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import torch

from quire.core.scheduling.drafter_costs import DrafterCosts
from quire.core.step import Drafted, DraftOrder, StepPlan
from quire.runtime.batch import StepBatch


class Drafter(Protocol):
    """Proposes the tokens that follow rows' tokens."""

    #: Whether `follow` must be called after each step.
    needs_hidden: bool

    def change(self, plan: StepPlan) -> None:
        """Learn of a plan's changes, which were made to the rows and copied within the KV cache."""
        ...

    def forget(self, blocks: Iterable[int]) -> None:
        """Learn that the contents of these blocks were replaced, by a load from a tier."""
        ...

    def draft(self, orders: Sequence[DraftOrder]) -> Mapping[int, Drafted]:
        """Carry out the orders, by row. All tokens of these rows are known.

        K and V of drafts go to the slots behind the rows' tokens.
        """
        ...

    def follow(self, step: StepBatch, hidden: torch.Tensor) -> None:
        """Take the hidden states [T, H] of a step, whose tokens were sampled and stored: `rows`
        have their new lengths, accepted drafts included. Valid until the next step."""
        ...

    def measure(self) -> DrafterCosts:
        """Measure runs, before any row is live."""
        ...

    def reset(self) -> None:
        """Learn that all rows were dropped. K and V of whole blocks stay valid."""
        ...
