"""Requests that pool, among others and alone, in worlds with every fault."""

from dataclasses import replace

import pytest

from quire.core.pooling import PoolingKind, PoolingParams
from quire.core.sampling_params import DecodingParams
from quire.core.step import Chunk, RowAdmission, StepPlan
from quire.simulation.fakes.fake_runner import FakeRunner
from quire.simulation.simulator import run
from quire.simulation.workload import SimulationConfig
from quire.simulation.worlds import draw_world


@pytest.mark.parametrize("index", range(6))
def test_all_get_the_result_of_their_whole_prompt(index):
    world = draw_world(11, index, num_steps=150, check_every=5)
    report = run(replace(world, pooling_rate=(0.4, 1.0)[index % 2]))
    assert report.finished["stop"] > 5


def test_preempted_and_interrupted_ones_compute_their_prompt_again():
    world = SimulationConfig(
        seed=3,
        num_requests=60,
        num_blocks=24,
        pooling_rate=0.6,
        output_tokens=(20, 60),
        prompt_tokens=(20, 60),
        policy="priority",
        step_failure_rate=0.05,
        crash_rate=0.01,
        overlap=1,
        arrivals="bursts",
    )
    report = run(world)
    assert report.num_preemptions and report.num_crashes


@pytest.mark.parametrize(
    ("pooling", "num_computed", "count"),
    [
        (PoolingParams(PoolingKind.MEAN), 4, 4),  # what came before is not there to be pooled
        (PoolingParams(PoolingKind.CLS, in_one_step=True), 0, 4),  # its tokens see each other
    ],
)
def test_the_fake_runner_sees_what_could_not_be_pooled(pooling, num_computed, count):
    config = SimulationConfig()
    runner = FakeRunner(config.groups, 16, 4, max_num_rows=2, max_num_tokens=40, model=config.model)
    params = DecodingParams(max_tokens=1, pooling=pooling)
    admission = RowAdmission(0, list(range(2, 10)), 8, num_computed, ((0, 1),), params)
    plan = StepPlan(0, 1, count, admit=(admission,), chunks=(Chunk(0, count),))
    with pytest.raises(AssertionError, match=r"pools all tokens|in several steps"):
        runner.execute(plan)
