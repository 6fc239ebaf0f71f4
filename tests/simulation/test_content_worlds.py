"""Prompts with contents, among others and alone, in worlds with every fault."""

from dataclasses import replace
from itertools import pairwise

import pytest

from quire.core.content_spans import ContentSpan
from quire.core.sampling_params import DecodingParams
from quire.core.scheduling.policy import POLICIES
from quire.core.step import Chunk, ItemLoad, RowAdmission, StepPlan
from quire.simulation.fakes.fake_model import FakeModel
from quire.simulation.fakes.fake_runner import FakeRunner
from quire.simulation.report import add_up
from quire.simulation.simulator import run
from quire.simulation.workload import SimulationConfig, draw_arrivals
from quire.simulation.worlds import draw_content_world, draw_world

DIGEST = "ab" * 16


def test_all_get_the_tokens_of_their_own_contents():
    worlds = [draw_content_world(31, index, num_steps=150, check_every=3) for index in range(6)]
    report = add_up([run(world) for world in worlds], 31)
    assert report.num_content_loads and report.num_adapter_loads and report.num_crashes
    assert report.num_partial_hits and report.num_hit_tokens and report.num_preemptions


@pytest.mark.parametrize(
    ("policy", "overlap"), [(name, index % 2) for index, name in enumerate(sorted(POLICIES))]
)
def test_one_slot_for_all_contents_starves_no_request(policy, overlap):
    world = SimulationConfig(
        seed=5,
        num_requests=40,
        num_blocks=40,
        policy=policy,
        overlap=overlap,
        content_rate=0.9,
        num_content_slots=1,
        adapter_rate=0.3,
        max_loras=1,
        arrivals="bursts",
        beam_rate=0.2,
        fork_rate=0.1,
        step_failure_rate=0.02,
        poison_rate=0.05,
        crash_rate=0.01,
    )
    report = run(world)
    assert report.num_content_loads > 6 and report.finished["error"]


def test_tiers_keep_blocks_by_their_contents():
    worlds = [
        SimulationConfig(
            seed=seed,
            num_requests=80,
            num_blocks=30,
            kinds=("full", "full,state:2")[seed],
            tier=(("block_s", 1e-5), ("latency_s", 0.001), ("failure_rate", 0.05)),
            content_rate=0.8,
            num_contents=4,
            num_cache_domains=1,
            public_rate=0.3,
            shared_prefix_rate=0.9,
            near_rate=0.3,
            overlap=seed,
            crash_rate=0.01,
        )
        for seed in range(2)
    ]
    report = add_up([run(world) for world in worlds], 0)
    assert report.num_content_loads and report.num_stored_blocks and report.num_loaded_tokens
    assert report.num_partial_hits and report.num_hit_tokens


def test_a_world_without_contents_is_what_it_was():
    world = SimulationConfig(seed=9, num_requests=30)
    other = replace(world, num_content_slots=7, num_contents=9)
    assert run(world).digest == run(other).digest
    drawn = [draw_world(3, index) for index in range(20)]
    assert not any(world.content_rate for world in drawn)


def test_equal_placeholders_with_other_contents_are_drawn_and_so_are_equal_prompts():
    config = SimulationConfig(
        num_requests=200, content_rate=0.8, repeat_rate=0.4, num_cache_domains=1
    )
    requests = [arrival.request for arrival in draw_arrivals(config)]
    pairs = [
        (first.content_spans == second.content_spans)
        for first, second in pairwise(requests)
        if first.prompt_token_ids == second.prompt_token_ids and first.content_spans
    ]
    assert 10 < sum(pairs) < len(pairs) - 10


def test_the_fake_model_tells_contents_apart_by_digest_and_offset():
    model, params = FakeModel(end_rate=0.0), DecodingParams(8)
    (arrival,) = draw_arrivals(SimulationConfig(num_requests=1, prompt_tokens=(12, 12)))
    base = replace(arrival.request, params=params, prompt_token_ids=[0] * 12)
    spans = [(), (ContentSpan(2, 4, DIGEST),), (ContentSpan(2, 4, "cd" * 16),)]
    spans += [(ContentSpan(2, 5, DIGEST),), (ContentSpan(3, 4, DIGEST),)]
    spans += [(ContentSpan(2, 2, DIGEST), ContentSpan(4, 2, DIGEST))]
    found = [model.expected_output(replace(base, content_spans=each)).token_ids for each in spans]
    assert len(set(found)) == len(found)


def make_runner() -> FakeRunner:
    config = SimulationConfig()
    return FakeRunner(config.groups, 16, 4, max_num_rows=2, max_num_tokens=40, model=config.model)


def plan(step_id: int, num_tokens: int, *loads: ItemLoad, admits: bool) -> StepPlan:
    spans = (ContentSpan(2, 4, DIGEST),)
    admission = RowAdmission(
        0, list(range(2, 10)), 8, 0, ((0, 1),), DecodingParams(4), content_spans=spans
    )
    return StepPlan(
        step_id,
        1,
        num_tokens,
        admit=(admission,) if admits else (),
        chunks=(Chunk(0, num_tokens),),
        content_loads=loads,
    )


def test_the_fake_runner_refuses_a_content_that_no_slot_has():
    with pytest.raises(AssertionError, match="which no slot has"):
        make_runner().execute(plan(0, 8, ItemLoad(0, "cd" * 16), admits=True))


def test_the_fake_runner_refuses_a_content_whose_slot_was_given_away():
    runner = make_runner()
    runner.execute(plan(0, 2, admits=True))  # only the tokens before it
    runner.sample()
    runner.result()
    runner.execute(plan(1, 2, ItemLoad(1, DIGEST), admits=False))
    runner.sample()
    runner.result()
    with pytest.raises(AssertionError, match="which no slot has"):
        runner.execute(plan(2, 2, ItemLoad(1, "cd" * 16), admits=False))
