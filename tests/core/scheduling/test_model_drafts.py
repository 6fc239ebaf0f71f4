"""Which rows a drafter drafts for, by what that is expected to bring and to take."""

import pytest
from tests.core.scheduling.test_drafts import make_pacer

from quire.core.scheduling.draft_lengths import Catching, DraftCandidate, choose_lengths
from quire.core.scheduling.drafter_costs import HANDOVER_S, DrafterCosts
from quire.core.scheduling.model_drafts import ModelDrafts
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
    candidate = DraftCandidate(100, (0.9, 0.6, 0.3, 0.1, 0.02), HERE)
    found = [
        choose_lengths([candidate], open_budget(1), DrafterCosts(share * step_s(), 0.0, 0.0))
        for share in (0.0, 0.5, 1.0)
    ]
    assert found[0].lengths > found[1].lengths > found[2].lengths == [0]


def test_a_run_counts_with_the_chance_that_the_drafter_gets_there() -> None:
    """The drafter stops where it is unsure, so that runs which are not made cost nothing."""
    costs = DrafterCosts(0.3 * step_s(), 0.0, 0.0)
    rare_but_long = DraftCandidate(100, (0.3, 0.29, 0.28, 0.27, 0.26, 0.25), HERE)
    assert choose_lengths([rare_but_long], open_budget(1), costs).lengths == [6]


def test_the_least_chance_is_what_a_run_and_its_verification_take() -> None:
    model, budget = ModelDrafts(DrafterCosts(0.2 * step_s(), 0.0, 0.0), 1000), open_budget(1)
    one, two = (model.least_chance(budget, count / step_s(), 1) for count in (1.0, 2.0))
    assert 0.2 < one < 0.4 and two == pytest.approx(2 * one)
    assert model.least_chance(open_budget(4), 1.0 / step_s(), 4) < one  # rows share the runs
    assert model.least_chance(StepBudget(100), 0.0, 1) == 0.0


def test_a_sure_drafter_goes_on_as_long_as_the_step_may_last() -> None:
    model = ModelDrafts(DrafterCosts(0.1 * step_s(), 0.0, 0.0), 1000)
    assert model.most_places(open_budget(1, ratio=100.0), 2, 9, 1) == 9
    assert 2 <= model.most_places(open_budget(1, ratio=1.6), 2, 9, 1) < 9
    assert model.most_places(StepBudget(100), 2, 9, 1) == 9


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
