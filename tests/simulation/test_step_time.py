"""The virtual clock's steps, and the models that know them well or badly."""

import pytest

from quire.core.scheduling.cost_model import StepLoad
from quire.simulation.step_time import SLOW_FACTOR, StepTime


def test_steps_take_a_base_and_so_much_a_token() -> None:
    steps = StepTime(0.0, seed=1)
    assert steps.draw_s(1) == pytest.approx(0.0105)
    assert steps.draw_s(101) - steps.draw_s(1) == pytest.approx(0.05)


def test_another_device_has_a_base_and_tokens_of_its_own() -> None:
    steps = StepTime(0.0, seed=1, base_s=0.002, token_s=0.00001)
    assert steps.draw_s(100) == pytest.approx(0.003)
    alone = StepLoad(4, 4)
    assert steps.make_model().predict_s(alone) == pytest.approx(steps.draw_s(4), rel=0.05)


def test_slow_steps_come_at_their_rate_and_replay() -> None:
    one, other = StepTime(0.2, 3), StepTime(0.2, 3)
    drawn = [one.draw_s(1) for _ in range(500)]
    again = [other.draw_s(1) for _ in range(500)]
    assert drawn == again
    slow = [seconds for seconds in drawn if seconds > 0.0106]
    assert 60 < len(slow) < 140
    assert slow == pytest.approx([SLOW_FACTOR * 0.0105] * len(slow))


def test_a_cost_model_has_the_injected_error_for_prompts() -> None:
    steps = StepTime(0.0, seed=1)
    alone, load = StepLoad(4, 4), StepLoad(4, 4).with_chunk(0, 64)
    right, wrong = steps.make_model(1.0), steps.make_model(2.0)
    assert right.predict_s(load) == pytest.approx(steps.draw_s(68), rel=0.05)
    assert right.predict_s(alone) == pytest.approx(steps.draw_s(4), rel=0.05)
    assert wrong.predict_s(load) > 1.2 * right.predict_s(load)
