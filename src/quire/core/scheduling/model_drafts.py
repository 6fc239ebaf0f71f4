"""Plans the drafts that the runner's drafter makes, a model or a head of the model.

Such drafts are unknown while a step is planned. So they are planned by what is expected of them: by
the chances that were learned for each place, and by the time of the drafter. When they have come,
`drafts` puts them into the step. A drafter computes a row only when drafts are ordered for it, and
first has to catch up on the row's tokens. That takes time once, which is charged to the steps that
the row is expected to take; in one step it may not take longer than the step itself.
"""

import math
from collections.abc import Mapping
from itertools import pairwise
from typing import NamedTuple
from weakref import WeakKeyDictionary

from quire.core.draft_stops import DraftStop
from quire.core.scheduling.draft_lengths import Catching, decodes_of
from quire.core.scheduling.drafter_costs import DrafterCosts
from quire.core.scheduling.pacing import StepBudget
from quire.core.scheduling.proposals import Proposal, Speculator
from quire.core.sequence import Sequence
from quire.core.step import Drafted, DraftOrder, Drafts

LEAST_LEFT = 32
"""Minimum number of tokens that a sequence is expected to generate yet. A sequence that has
generated more is expected to generate the same number again."""

FEW_MISSING = 2
"""A row that misses at most this number of tokens catches up in the run that makes its first
draft."""

LEAST_CATCH_UP = 16
"""The tokens on which rows may catch up in any step."""


MOST_LEFT_OUT = 31
"""If no draft of the drafter pays in a plan, 1, 3, and so on up to this number of plans follow that
don't consider it, since that takes time."""


class OrderedDrafts(NamedTuple):
    """Drafts that are ordered for a sequence in the step that is being planned."""

    sequence: Sequence
    #: A proposal without tokens: the chances of the drafts. None if the row only catches up.
    expected: Proposal
    #: See `DraftOrder`.
    most_tokens: int
    #: See `DraftOrder`.
    stop: DraftStop = DraftStop()

    @property
    def num_drafts(self) -> int:
        """The number of drafts."""
        return len(self.expected.survival)


class ModelDrafts:
    """Which rows the drafter may draft for, and what that takes."""

    def __init__(self, costs: DrafterCosts, max_len: int) -> None:
        """`max_len` is the maximum length of a sequence that the drafter can compute."""
        self.costs = costs
        self._max_len = max_len
        # Sequence -> (its num_admissions, the number of its tokens with the drafter's K and V).
        self._reached: WeakKeyDictionary[Sequence, tuple[int, int]] = WeakKeyDictionary()
        # The number of plans that still leave the drafter out, and that did so the last time.
        self._num_to_leave_out = self._num_left_out = 0

    def is_considered(self) -> bool:
        """Whether the plan that begins considers the drafter."""
        if self._num_to_leave_out:
            self._num_to_leave_out -= 1
            self.costs.recover()
            return False
        return True

    def end_plan(self, *, has_ordered: bool) -> None:
        """Learn whether drafts were ordered in a plan that considered the drafter."""
        if has_ordered:
            self._num_left_out = 0
        else:
            self.costs.recover()
            self._num_left_out = min(2 * self._num_left_out + 1, MOST_LEFT_OUT)
            self._num_to_leave_out = self._num_left_out

    @property
    def is_in_use(self) -> bool:
        """Whether the last plan that considered the drafter has ordered drafts."""
        return not self._num_left_out

    def expect(self, speculator: Speculator, sequence: Sequence, most: int) -> Proposal:
        """A proposal without tokens: the chances of at most `most` drafts after the sequence's
        tokens."""
        most = min(most, self._max_len - len(sequence.token_ids))
        return speculator.expect(sequence, max(0, most))

    def num_missing(self, sequence: Sequence) -> int:
        """Number of the sequence's tokens for which the drafter probably has no K and V."""
        num_admissions, reached = self._reached.get(sequence, (-1, 0))
        if num_admissions != sequence.num_admissions:
            reached = 0
        return max(1, len(sequence.token_ids) - reached)

    def catching(self, sequence: Sequence, expected: Proposal, most: int) -> Catching:
        """The tokens that a row has to catch up on. At most `most` of them fit into this step."""
        num_left = max(LEAST_LEFT, sequence.num_output_tokens)
        num_left = min(num_left, sequence.max_num_tokens - len(sequence.token_ids))
        num_steps = num_left / (1 + sum(expected.survival))
        num_missing = self.num_missing(sequence)
        num_now = num_missing if num_missing <= FEW_MISSING else min(num_missing, most)
        return Catching(num_missing, 1 / max(1.0, num_steps), num_now)

    def net_tokens(self, expected: Proposal, budget: StepBudget, num_rows: int) -> float:
        """The tokens that drafts of one row are expected to gain, less those that all rows lose
        while the drafter runs; `num_rows` rows share its runs."""
        token_s = 0.0
        if budget.model is not None:
            token_s = budget.model.predict_s(decodes_of(budget.load)) / max(
                1, budget.load.num_decodes
            )
        if not token_s:
            return sum(expected.survival)
        cost = self.costs.predict_s((num_rows,), 0) / num_rows / token_s
        # A run takes place if the draft before it was good.
        gains = [chance - cost * before for before, chance in pairwise((1.0, *expected.survival))]
        return sum([max(0.0, gain) for gain in gains])

    def least_chance(self, budget: StepBudget, rate: float, num_rows: int) -> float:
        """The chance to be accepted from which a draft pays: it brings more tokens per second than
        `rate`, the step's, if `num_rows` rows share the drafter's runs."""
        if budget.model is None:
            return 0.0
        own_s = self.costs.run_s_of(num_rows) / num_rows
        verify_s = budget.model.predict_s(budget.load.with_drafts(0, 1))
        return rate * (own_s + verify_s - budget.model.predict_s(budget.load))

    def most_places(self, budget: StepBudget, chosen: int, most: int, num_rows: int) -> int:
        """Maximum number of drafts, from `chosen` up to `most`, that may be ordered for each of
        num_rows rows within the step's limit of time."""
        limit_s = budget.drafts_limit_s()
        if budget.model is None or limit_s == math.inf:
            return most
        for places in range(chosen + 1, most + 1):
            load = budget.load.with_drafts(0, num_rows * places)
            drafter_s = self.costs.predict_s((num_rows,) * places, 0)
            if budget.model.predict_s(load) + drafter_s > limit_s:
                return places - 1
        return most

    def most_catch_up(self, budget: StepBudget) -> int:
        """Maximum number of tokens that the drafter may compute in this step to catch up.

        They take at most the time of the step's decoding rows, and keep the step within its limit.
        """
        token_s = self.costs.predict_s((), 1)
        if budget.model is None or not token_s:
            return max(LEAST_CATCH_UP, budget.num_tokens)
        own_s = budget.model.predict_s(budget.load)
        spare_s = min(
            budget.model.predict_s(decodes_of(budget.load)), budget.drafts_limit_s() - own_s
        )
        return max(LEAST_CATCH_UP, int(spare_s / token_s))

    def orders(self, planned: Mapping[int, OrderedDrafts]) -> tuple[DraftOrder, ...]:
        """The orders of a plan, by row."""
        return tuple(
            DraftOrder(row, each.num_drafts, each.most_tokens, each.stop)
            for row, each in planned.items()
        )

    def learn(self, planned: Mapping[int, OrderedDrafts], drafts: Drafts) -> None:
        """Learn from the drafter's work how far it has come, and how long it takes."""
        runs: list[int] = []
        num_missing = 0
        for row, each in planned.items():
            drafted = drafts.of_rows[row]
            before = self.num_missing(each.sequence)
            self._set_reached(each.sequence, drafted.num_reached_tokens)
            if before > FEW_MISSING:
                num_missing += max(0, before - self.num_missing(each.sequence))
            for place in range(len(drafted.token_ids)):
                if place == len(runs):
                    runs.append(0)
                runs[place] += 1
        self.costs.observe(runs, num_missing, drafts.seconds)

    def confirm(self, sequence: Sequence, drafted: Drafted, num_accepted: int) -> None:
        """Learn how many of a row's drafts are right; the drafter has K and V for all but the last
        of those that it made."""
        num_right = min(num_accepted, len(drafted.token_ids) - 1)
        self._set_reached(sequence, drafted.num_reached_tokens + max(0, num_right))

    def _set_reached(self, sequence: Sequence, num_tokens: int) -> None:
        self._reached[sequence] = sequence.num_admissions, num_tokens
