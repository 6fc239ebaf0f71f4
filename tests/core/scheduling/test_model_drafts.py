"""Which rows a drafter drafts for, by what that is expected to bring and to take."""

import pytest
from tests.core.scheduling.test_drafts import make_pacer

from quire.core.scheduling.draft_lengths import Catching, DraftCandidate, choose_lengths
from quire.core.scheduling.drafter_costs import HANDOVER_S, DrafterCosts
from quire.core.scheduling.pacing import StepBudget, StepDemand

LIKELY = (0.9, 0.8, 0.7, 0.6, 0.5)
HERE = Catching(1, 0.1, 1)


def open_budget(num_rows: int, *, ratio: float = 100.0) -> StepBudget:
    return make_pacer(ratio=ratio).open_step(StepDemand(2048, num_rows, num_rows * 100, 0))


def lengths(num_rows: int, costs: DrafterCosts, catching: Catching = HERE) -> list[int]:
    candidates = [DraftCandidate(100, LIKELY, catching)] * num_rows
    return choose_lengths(candidates, open_budget(num_rows), costs).lengths


def step_s() -> float:
    budget = open_budget(1)
    assert budget.model is not None
    return budget.model.predict_s(budget.load)


def test_a_cheap_drafter_drafts_as_much_as_known_drafts() -> None:
    known = choose_lengths([DraftCandidate(100, LIKELY)], open_budget(1)).lengths
    assert lengths(1, DrafterCosts(0.0, 0.0, 0.0)) == known
    assert known[0] > 0


def test_a_slower_drafter_drafts_less_and_one_as_slow_as_the_model_nothing() -> None:
    found = [lengths(1, DrafterCosts(share * step_s(), 0.0, 0.0))[0] for share in (0.0, 0.3, 1.0)]
    assert found[0] > found[1] > found[2] == 0


def test_rows_share_runs() -> None:
    """A run that does not pay for one of four rows pays for all of them."""
    costs = DrafterCosts(0.85 * step_s(), 0.0, 0.0)
    one = choose_lengths([DraftCandidate(100, LIKELY, HERE)], open_budget(4), costs)
    assert one.lengths == [0]
    assert min(lengths(4, costs)) > 0


def test_catching_up_counts_by_the_steps_that_profit_from_it() -> None:
    costs = DrafterCosts(0.0, 0.0, step_s() / 100)
    assert lengths(1, costs, Catching(1000, 1 / 1000, 10))[0] > 0
    assert lengths(1, costs, Catching(1000, 1.0, 10)) == [0]


def test_the_time_of_drafting_is_part_of_a_paced_step() -> None:
    """A step of one row may take 1.5 times as long."""
    costs = DrafterCosts(0.0, 0.0, step_s() / 100)
    candidates = [DraftCandidate(100, LIKELY, Catching(100, 0.0, 100))]
    assert choose_lengths(candidates, open_budget(1), costs).lengths[0] > 0
    assert choose_lengths(candidates, open_budget(1, ratio=1.5), costs).lengths == [0]


def test_costs_follow_the_measured_times_but_for_outliers() -> None:
    costs = DrafterCosts(1.0, 0.5, 0.1)
    assert costs.predict_s((2, 1), 10) == pytest.approx(HANDOVER_S + 2 + 1.5 + 1)
    for _ in range(200):
        costs.observe((1,), 0, 3.0)
    assert costs.predict_s((1,), 0) == pytest.approx(HANDOVER_S + 3.0)
    costs.observe((1,), 0, 1000.0)
    assert costs.predict_s((1,), 0) == pytest.approx(HANDOVER_S + 3.0 * 1.05)
    for _ in range(10_000):
        costs.recover()
    assert costs.predict_s((1,), 0) == pytest.approx(1.5, rel=1e-3)
