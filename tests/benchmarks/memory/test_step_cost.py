"""A runner without a model takes the time that the cost says."""

import math

import pytest
from benchmarks.memory.step_cost import StepCost, counting_runner

from quire.core.sampling_params import DecodingParams
from quire.core.step import Chunk, RowAdmission, RowFork, StepPlan
from quire.errors import ConfigurationError
from quire.simulation.virtual_engine import CountingRunner, VirtualClock

PARAMS = DecodingParams(9)
COST = StepCost(base_s=1.0, token_s=0.1, context_token_s=0.001)


def admission(row: int, num_tokens: int, num_computed: int = 0) -> RowAdmission:
    return RowAdmission(row, [7] * num_tokens, num_tokens, num_computed, ((),), PARAMS)


def step(runner: CountingRunner, plan: StepPlan) -> list[int]:
    """The rows that sampled, one token each."""
    runner.execute(plan)
    runner.sample()
    result = runner.result()
    assert result.step_id == plan.step_id
    assert all(len(token_ids) == 1 for token_ids in result.token_ids)
    return list(result.rows)


def test_a_row_samples_when_it_closes_its_gap() -> None:
    clock = VirtualClock()
    runner = counting_runner(COST, clock, 16)
    admit = (admission(2, 5), admission(0, 3, num_computed=2))
    assert step(runner, StepPlan(0, 2, 4, admit=admit, chunks=(Chunk(2, 3),))) == [0]
    assert clock() == pytest.approx(1.0 + 0.4 + 0.001 * (3 + 3))
    assert step(runner, StepPlan(1, 2, 3, chunks=(Chunk(2, 2),))) == [2, 0]
    assert step(runner, StepPlan(2, 2, 1, chunks=(Chunk(0, 0),))) == [2]
    assert step(runner, StepPlan(3, 1, 1, release=(2,))) == [0]
    contexts = (3 + 3) + (5 + 4) + 6 + 5
    assert clock() == pytest.approx(4 * 1.0 + 0.1 * 9 + 0.001 * contexts)


def test_after_a_reset_no_row_is_left() -> None:
    runner = counting_runner(COST, VirtualClock(), 16)
    step(runner, StepPlan(0, 1, 3, admit=(admission(0, 3),), chunks=(Chunk(0, 3),)))
    runner.reset()
    plan = StepPlan(1, 1, 4, admit=(admission(0, 4),), chunks=(Chunk(0, 4),))
    assert step(runner, plan) == [0]


def test_a_branch_that_joins_samples_with_its_source_and_costs_no_time() -> None:
    clock = VirtualClock()
    runner = counting_runner(COST, clock, 16)
    fork = RowFork(1, 0, PARAMS, branch_index=1, joins_step=True)
    plan = StepPlan(0, 2, 4, admit=(admission(0, 4),), forks=(fork,), chunks=(Chunk(0, 4),))
    assert step(runner, plan) == [0, 1]
    assert clock() == pytest.approx(1.0 + 0.4 + 0.001 * 4)
    assert step(runner, StepPlan(1, 2, 2)) == [0, 1]
    assert clock() == pytest.approx(2 * 1.0 + 0.1 * 6 + 0.001 * (4 + 5 + 5))


def test_the_default_cost_is_twice_the_floors_of_the_published_machine() -> None:
    cost, weight_bytes = StepCost(), 26e9
    assert cost.base_s == pytest.approx(2 * weight_bytes / 1555e9, rel=0.01)
    assert cost.token_s == pytest.approx(2 * 2 * 13e9 / 312e12, rel=0.01)
    assert cost.context_token_s == pytest.approx(2 * (40 * 5120 * 2 * 2) / 1555e9, rel=0.01)
    assert cost.seconds(30, 30 * 440) == pytest.approx(0.052, rel=0.02)


def test_the_clock_never_goes_back() -> None:
    clock = VirtualClock()
    clock.wait_until(2.0)
    clock.wait_until(1.0)
    assert clock() == 2.0
    clock.wait_until(5.0)
    assert clock() == 5.0


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"base_s": -1.0}, "base_s is -1.0"),
        ({"token_s": math.nan}, "token_s is nan"),
        ({"context_token_s": math.inf}, "context_token_s is inf"),
        ({"base_s": 0.0, "token_s": 0.0}, "no step would take any time"),
    ],
)
def test_an_impossible_cost_is_refused(options: dict[str, float], text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        StepCost(**options)
