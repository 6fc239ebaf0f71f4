"""Chooses how many drafts a step verifies behind each row.

A draft survives if it and all drafts before it are accepted. Then it saves its row a step. But a
step with drafts takes longer. So drafts are taken in the order of their chances to survive, up to
the number with the most tokens per second. These are the tokens that the decoding rows are expected
to get, divided by the time that the cost model predicts. One row may get many drafts. A step of
many rows already uses all of the processor. Then a draft costs nearly as much as a token, and few
drafts or none are taken.
"""

from collections.abc import Sequence
from typing import NamedTuple

from quire.core.scheduling.cost_model import StepLoad
from quire.core.scheduling.pacing import StepBudget

GIVE_UP_RATE = 0.9
"""The search ends at a rate below this share of the best one. It does not end at the first lower
rate, because the predicted cost of rows has corners."""


class DraftCandidate(NamedTuple):
    """The drafts that a decoding row could get."""

    num_computed_tokens: int
    #: The estimated chance that each draft, and all drafts before it, are accepted. Never grows.
    survival: Sequence[float]


def is_worth_drafts(budget: StepBudget) -> bool:
    """Whether a draft that is sure to be accepted would pay in this step."""
    if budget.num_tokens <= 0:
        return False
    model, load = budget.model, budget.load
    if model is None:
        return True
    cost_s = model.predict_s(load.with_drafts(0, 1)) - model.predict_s(load)
    return cost_s * load.num_decodes < model.predict_s(decodes_of(budget.load))


def choose_lengths(candidates: Sequence[DraftCandidate], budget: StepBudget) -> list[int]:
    """The number of drafts of each candidate, which are in the order of their ranks.

    `budget` has all other work of the step. Without a cost model, its tokens alone are the limit.
    """
    order = [
        (-chance, index)
        for index, candidate in enumerate(candidates)
        for chance in candidate.survival
    ]
    order.sort()
    taken = [index for _, index in order[: budget.num_tokens]]
    if budget.model is not None:
        chances = [-chance for chance, _ in order[: budget.num_tokens]]
        taken = taken[: _best_count(candidates, taken, chances, budget)]
    lengths = [0] * len(candidates)
    for index in taken:
        lengths[index] += 1
    return lengths


def _best_count(
    candidates: Sequence[DraftCandidate],
    order: Sequence[int],
    chances: Sequence[float],
    budget: StepBudget,
) -> int:
    """The number of drafts at which tokens per second are highest.

    order: the candidate of each draft. The time is that of the decoding rows, because chunks of
    prompts make a step long without the drafts' doing.
    """
    model, load, limit_s = budget.model, budget.load, budget.drafts_limit_s()
    assert model is not None
    others_s = model.predict_s(load) - model.predict_s(decodes_of(budget.load))
    # A row that was just admitted counts as a chunk, even if it computes one token.
    expected = float(max(1, load.num_decodes))
    best, best_rate = 0, expected / (model.predict_s(load) - others_s)
    lengths = [0] * len(candidates)
    for count, (index, chance) in enumerate(zip(order, chances, strict=True), 1):
        num_before = candidates[index].num_computed_tokens + lengths[index]
        load = load.with_drafts(num_before, 1)
        lengths[index] += 1
        seconds = model.predict_s(load)
        if seconds > limit_s:
            break
        expected += chance
        rate = expected / (seconds - others_s)
        if rate > best_rate:
            best, best_rate = count, rate
        elif rate < GIVE_UP_RATE * best_rate:
            break
    return best


def decodes_of(load: StepLoad) -> StepLoad:
    """The part of a load that is not due to chunks of prompts."""
    return load._replace(num_chunk_tokens=0, num_chunk_pairs=0, num_logprob_tokens=0, num_chunks=0)
