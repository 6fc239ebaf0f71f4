"""How far steps are from themselves: by kind and length, beside what is usual of their run."""

import json
import math
import random

import pytest

from quire.core.scheduling.cost_model import StepLoad
from quire.planning.measuring import MeasuredStep
from quire.planning.step_spread import StepSpread, fit_spread
from quire.simulation.planned_work import PlannedWork

DECODES = PlannedWork(StepLoad(4, 400), 100, (0, 1, 2, 3))
PROMPTS = PlannedWork(StepLoad(4, 400).with_chunk(0, 50), 100, (0, 1, 2, 3))


def _steps(work: PlannedWork, seconds: float, late_s: float, first_run: int) -> list[MeasuredStep]:
    """One in ten is late, by as much; each second run was slower the second time."""
    rng = random.Random(first_run)
    found = []
    for run in range(first_run, first_run + 20):
        slower = 1.3 if run % 2 else 1.0
        for _ in range(20):
            once, again = (seconds + late_s * (rng.random() < 0.1) for _ in range(2))
            found.append(MeasuredStep(run, work, (once, slower * again)))
    return found


def test_short_steps_are_relatively_further_off_than_long_ones() -> None:
    steps = _steps(DECODES, 1e-3, 1e-3, 0) + _steps(DECODES, 1e-1, 1e-3, 100)
    spread = fit_spread(steps, [1e-3] * 400 + [1e-1] * 400)
    short, long = (spread.at(False, seconds, 0.99) for seconds in (1e-3, 1.0))
    assert short > 1.7 and long < 1.2
    middle = [spread.at(False, seconds, 0.5) for seconds in (1e-3, 1.0)]
    assert max(middle) < 1.1  # a slower run is none of steps that differ


def test_steps_with_prompts_are_of_their_own_kind() -> None:
    steps = _steps(DECODES, 1e-3, 1e-3, 0) + _steps(PROMPTS, 1e-3, 0.0, 100)
    spread = fit_spread(steps, [1e-3] * 800)
    assert spread.at(False, 1e-3, 0.99) > 1.7 and spread.at(True, 1e-3, 0.99) < 1.2
    for kind, place in ((True, 0.0), (False, 0.3), (False, 0.999)):
        again = StepSpread.from_list(json.loads(json.dumps(spread.as_list())))
        assert again.at(kind, 1e-3, place) == spread.at(kind, 1e-3, place)


def test_many_steps_take_as_long_in_the_mean_as_they_did() -> None:
    steps = _steps(DECODES, 1e-3, 0.5e-3, 0)[:90]
    spread = fit_spread(steps, [1e-3] * len(steps))
    mean_s = math.fsum(sum(step.seconds) for step in steps) / (2 * len(steps))
    expected = math.fsum(spread.at(False, 1e-3, place / 100) for place in range(100)) / 100
    assert expected == pytest.approx(mean_s / 1e-3, rel=0.01)


def test_without_steps_all_take_what_is_predicted() -> None:
    assert StepSpread().at(True, 1.0, 0.99) == 1.0
