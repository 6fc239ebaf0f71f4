"""Chooses how many drafts a step verifies for each row.

A draft survives if it and all drafts before it are accepted. Then it saves its row a step. But a
step with drafts takes longer. So drafts are taken in the order of their chances to survive, up to
the number that yields the most tokens per second. These are the tokens that the decoding rows are
expected to get, divided by the time that the cost model predicts. One row may get many drafts. A
step of many rows already uses all of the processor. Then a draft costs nearly as much as a token,
and few drafts or none are taken.

A model that drafts takes time, too. One run makes the next draft of all rows. The model may first
have to catch up on a row. It stops after a draft with a low probability. So the time of a run, and
of verifying its draft, is weighted with the chance that the run takes place.

In models with states an accepted draft is computed twice. The choice of a draft counts both times.
The step that computes the draft again counts it like the chunks of prompts.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from quire.core.scheduling.cost_model import SHORTEST_S, StepLoad
from quire.core.scheduling.drafter_costs import DrafterCosts
from quire.core.scheduling.pacing import StepBudget

GIVE_UP_RATE = 0.9
"""The search ends at a rate below this share of the best one. It does not end at the first lower
rate, because the predicted cost of rows has corners."""


class Catching(NamedTuple):
    """The tokens of a row on which a drafter has to catch up before its first draft."""

    num_missing: int
    #: The share of the time to catch up that this step is charged; later steps profit, too.
    share: float
    #: The number of these tokens that fit into this step. If some do not fit, the row gets no
    #: drafts in this step.
    num_now: int


class DraftCandidate(NamedTuple):
    """The drafts that a decoding row could get."""

    num_computed_tokens: int
    #: The estimated chance that each draft, and all drafts before it, are accepted. Never grows.
    survival: Sequence[float]
    #: None if the drafts are known already.
    catching: Catching | None = None
    #: Whether a later step computes accepted drafts again, as in models with states.
    is_replayed: bool = False


class DraftChoice(NamedTuple):
    """The chosen numbers of drafts."""

    lengths: list[int]
    #: The expected tokens per second; 0 without a cost model.
    rate: float


def least_tokens(budget: StepBudget) -> float:
    """The number of tokens that steps without drafts give in the time that the first draft takes.
    Drafts of any number pay only if they are expected to bring more tokens. From 1 on, no draft
    pays in this step."""
    if budget.num_tokens <= 0:
        return math.inf
    model, load = budget.model, budget.load
    if model is None:
        return 0.0
    has_others = load.num_chunks or load.num_replay_tokens
    decodes_s = model.predict_s(decodes_of(load) if has_others else load)
    if decodes_s < SHORTEST_S:
        return math.inf
    return model.first_draft_s(load) * load.num_decodes / decodes_s


def choose_lengths(
    candidates: Sequence[DraftCandidate],
    budget: StepBudget,
    costs: DrafterCosts | None = None,
    spent_s: float = 0.0,
) -> DraftChoice:
    """The number of drafts of each candidate, which are in the order of their ranks.

    `budget` has all other work of the step. Without a cost model, its tokens alone are the limit.
    `costs` are those of the drafter, if candidates are `catching`. `spent_s` are the seconds of the
    step that the drafter has taken already.
    """
    order = [
        (-chance, index)
        for index, candidate in enumerate(candidates)
        for chance in candidate.survival
    ]
    order.sort()
    taken = [index for _, index in order[: budget.num_tokens]]
    rate = 0.0
    if budget.model is not None:
        chances = [-chance for chance, _ in order[: budget.num_tokens]]
        best, rate = _best_count(candidates, taken, chances, budget, _DrafterTime(costs, spent_s))
        taken = taken[:best]
    lengths = [0] * len(candidates)
    for index in taken:
        lengths[index] += 1
    return DraftChoice(lengths, rate)


class _DrafterTime:
    """The time of a drafter that makes the drafts chosen so far."""

    def __init__(self, costs: DrafterCosts | None, spent_s: float) -> None:
        self._costs = costs
        self._runs: list[int] = []
        #: Seconds that the drafter takes in this step at most, and seconds that are charged.
        self.whole_s, self.charged_s = spent_s, 0.0

    def add(self, place: int, catching: Catching, chance: float) -> None:
        """Add draft number `place` of a row. The drafter makes it with this chance."""
        assert self._costs is not None
        before_s = self._costs.predict_s(self._runs, 0)
        if place == len(self._runs):
            self._runs.append(0)
        self._runs[place] += 1
        run_s = self._costs.predict_s(self._runs, 0) - before_s
        self.whole_s += run_s
        self.charged_s += chance * run_s
        if not place:
            self.whole_s += self._costs.predict_s((), catching.num_now)
            self.charged_s += self._costs.predict_s((), catching.num_missing) * catching.share


def _best_count(
    candidates: Sequence[DraftCandidate],
    order: Sequence[int],
    chances: Sequence[float],
    budget: StepBudget,
    drafter: _DrafterTime,
) -> tuple[int, float]:
    """The number of drafts at which tokens per second are highest, and these tokens per second.

    order: the candidate of each draft. Only the time of decoding rows counts, since chunks of
    prompts make a step long in any case.
    """
    model, load, limit_s = budget.model, budget.load, budget.drafts_limit_s()
    assert model is not None
    others_s = model.predict_s(load) - model.predict_s(decodes_of(budget.load))
    # A row that was just admitted counts as a chunk, even if it computes one token.
    expected = float(max(1, load.num_decodes))
    last_s = verify_s = model.predict_s(load)
    best, best_rate = 0, expected / (verify_s - others_s)
    lengths = [0] * len(candidates)
    # A drafter's run pays only once several rows share it.
    patience = sum([candidate.catching is not None for candidate in candidates])
    replay_s = 0.0
    for count, (index, chance) in enumerate(zip(order, chances, strict=True), 1):
        candidate = candidates[index]
        num_before = candidate.num_computed_tokens + lengths[index]
        load = load.with_drafts(num_before, 1)
        reached = 1.0  # the chance that the drafter makes this draft
        if candidate.catching is not None:
            if lengths[index]:
                reached = candidate.survival[lengths[index] - 1]
            drafter.add(lengths[index], candidate.catching, reached)
        lengths[index] += 1
        seconds = model.predict_s(load)
        if seconds + drafter.whole_s > limit_s:
            break
        verify_s += reached * (seconds - last_s)
        last_s = seconds
        if candidate.is_replayed:
            again_s = model.predict_s(load.with_replay(num_before, 1)) - seconds
            replay_s += chance * again_s
        expected += chance
        rate = expected / (verify_s + replay_s - others_s + drafter.charged_s)
        if rate > best_rate:
            best, best_rate = count, rate
        elif rate < GIVE_UP_RATE * best_rate and count - best >= patience:
            break
    return best, best_rate


def decodes_of(load: StepLoad) -> StepLoad:
    """The part of a load that is not due to chunks of prompts, nor to earlier steps' drafts."""
    return load._replace(
        num_chunk_tokens=0,
        num_chunk_pairs=0,
        num_logprob_tokens=0,
        num_chunks=0,
        num_replay_tokens=0,
    )
