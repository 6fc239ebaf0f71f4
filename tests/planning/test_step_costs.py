"""The fit of what steps take: exact, noisy, disturbed; kept as data."""

import json
import random

import pytest
from tests.planning.costs import draw_steps, draw_work, known_step_costs, true_s

from quire.core.scheduling.cost_model import StepLoad
from quire.planning.measuring import MeasuredStep
from quire.planning.step_costs import MeasuredBounds, StepCosts, fit_costs, mean_error
from quire.simulation.planned_work import PlannedWork


def test_a_fit_recovers_costs_of_the_models_form() -> None:
    costs, rng = known_step_costs(), random.Random(11)
    for _ in range(200):
        work = draw_work(rng)
        assert costs.predict_s(work) == pytest.approx(true_s(work), rel=0.03)
    assert costs.accuracy.held_out < 0.01
    assert costs.accuracy.repeated == 0


def test_noise_is_averaged_and_the_error_is_said() -> None:
    costs = fit_costs(draw_steps(noise=0.1))
    assert mean_error(costs, draw_steps(noise=0.0)) < 0.03
    assert 0.04 < costs.accuracy.held_out < 0.07
    assert 0.05 < costs.accuracy.repeated < 0.09


def test_outliers_move_the_fit_little() -> None:
    costs = fit_costs(draw_steps(noise=0.02, outliers=0.05))
    assert mean_error(costs, draw_steps(noise=0.0)) < 0.05


def test_a_machine_that_is_slower_for_a_while_is_told_from_longer_steps() -> None:
    """Rounds are four runs; every third one took half as long again."""
    steps = []
    for step in draw_steps(num_runs=120, noise=0.02):
        slower = 1.5 if step.run // 4 % 3 == 2 else 1.0
        taken = (slower * step.seconds[0], slower * step.seconds[1])
        steps.append(MeasuredStep(step.run, step.work, taken))
    costs = fit_costs(steps)
    assert costs.accuracy.held_out < 0.03
    assert mean_error(costs, draw_steps(noise=0.0)) < 0.03
    assert mean_error(costs, steps) > 0.08


def test_bounds_are_those_of_the_fitted_steps() -> None:
    costs = known_step_costs()
    assert costs.bounds.lacking(64, 1000, 1900, 1000) is None
    assert (
        costs.bounds.lacking(64, 1000, 9000, 1000) == "9,000 tokens in a sequence (measured: 1,996)"
    )
    lacking = MeasuredBounds(4, 100, 50, 90).lacking(6, 126, 50, 900)
    assert lacking == (
        "6 rows in a step (measured: 4), 126 tokens in a step (measured: 100), 900 tokens in all"
        " decoding sequences (measured: 90)"
    )


def _spread(costs: StepCosts, work: PlannedWork) -> list[float]:
    return [costs.deviation(work, costs.predict_s(work), place / 100) for place in range(100)]


def test_the_spread_is_how_far_steps_are_from_themselves() -> None:
    work = draw_work(random.Random(5))
    assert _spread(known_step_costs(), work) == pytest.approx([1.0] * 100, rel=0.02)
    spread = _spread(fit_costs(draw_steps(noise=0.3)), work)
    assert spread == sorted(spread)
    assert 0.65 < spread[5] < 0.85 and 1.2 < spread[94] < 1.6
    disturbed = _spread(fit_costs(draw_steps(outliers=0.05)), work)
    assert 0.9 < disturbed[0] < disturbed[80] < 1.1 and disturbed[-1] > 2


def test_it_is_kept_as_plain_data() -> None:
    costs = known_step_costs()
    again = StepCosts.from_mapping(json.loads(json.dumps(costs.as_mapping())))
    work = draw_work(random.Random(1))
    assert again.predict_s(work) == costs.predict_s(work)
    assert _spread(again, work) == _spread(costs, work)
    assert again.accuracy == costs.accuracy
    assert again.pacing_model().predict_s(StepLoad(3, 30)) > 0


def test_the_parts_of_a_step_sum_up() -> None:
    costs, rng = known_step_costs(), random.Random(2)
    for _ in range(20):
        work = draw_work(rng)
        parts = costs.split_s(work)
        assert sum(parts.values()) == pytest.approx(costs.predict_s(work))
        assert min(parts.values()) > -1e-9
    idle = costs.split_s(PlannedWork(StepLoad(1, 1), 1, (0,)))
    assert idle["prompts"] == pytest.approx(0, abs=1e-9)


def test_a_pacer_s_model_is_new_each_time() -> None:
    costs = known_step_costs()
    model = costs.pacing_model()
    before = costs.pacing_model().predict_s(StepLoad(4, 40))
    for _ in range(50):
        model.observe(StepLoad(4, 40), 1.0)
    assert costs.pacing_model().predict_s(StepLoad(4, 40)) == before
