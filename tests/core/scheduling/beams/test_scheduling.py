"""Beams as forks: what plans say of them, what they share, and that nothing disturbs a search."""

from collections import Counter

import pytest
from tests.core.harness import NEVER_ENDS, Harness, greedy_harness, launch, make_memory
from tests.core.scheduling.test_in_flight import run_ahead

from quire.core.request import FinishReason
from quire.core.sampling_params import DecodingParams
from quire.core.scheduling.policy import FairPolicy, PriorityPolicy
from quire.core.sequence import Sequence, SequenceState
from quire.core.step import StepPlan
from quire.simulation.fakes.fake_model import FakeModel

RUNNING, PREEMPTED = SequenceState.RUNNING, SequenceState.PREEMPTED


def beams(harness: Harness, leader: Sequence) -> list[Sequence]:
    return harness.scheduler.beams.members_with(leader)


def steps_of(harness: Harness, leader: Sequence) -> list[StepPlan]:
    """All plans until the search has ended."""
    plans = []
    while not leader.is_finished or harness.scheduler.has_unfinished:
        plans.append(harness.step())
    return plans


@pytest.mark.parametrize("num_groups", [1, 2])
@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("width", [1, 2, 4, 6])
def test_a_step_computes_a_token_and_copies_a_block_at_most_for_each_beam(
    width: int, block_size: int, num_groups: int
) -> None:
    harness = Harness(make_memory(300, block_size, num_groups), max_num_seqs=width)
    leader = harness.add("a", 10, params=DecodingParams(12, beam_width=width))
    first = harness.step()
    assert (first.num_tokens, first.copies, first.forks) == (10, (), ())
    num_reordered = 0
    while harness.scheduler.has_unfinished:
        is_partial = (len(beams(harness, leader)[0].token_ids) - 1) % block_size > 0
        plan = harness.step()
        assert plan.num_tokens == width == plan.num_rows
        assert not plan.admit
        assert not any(fork.joins_step for fork in plan.forks)
        rows = {row for row in range(width)}
        copied = Counter(edit.row for edit in plan.table_edits if edit.kind.value == "replace")
        assert set(copied) <= rows and max(copied.values(), default=0) <= num_groups
        assert len(plan.copies) == sum(copied.values()) <= (width - 1) * num_groups * is_partial
        num_reordered += len(plan.forks)
    assert num_reordered >= width - 1
    harness.check_answers()


def test_children_share_all_blocks_of_their_parent_by_reference() -> None:
    harness = Harness(make_memory(60), max_num_seqs=4)
    leader = harness.add("a", 10, params=DecodingParams(6, beam_width=4))
    harness.step()
    assert len(beams(harness, leader)) == 4
    assert harness.memory.pool.num_held == 3, "four beams, and the blocks of one"
    plan = harness.launch()
    assert len(plan.copies) == 3, "the last of the four writes in place"
    assert harness.memory.pool.num_held == 6
    prompt_blocks = [beam.block_tables[0][:2] for beam in beams(harness, leader)]
    assert prompt_blocks == [prompt_blocks[0]] * 4
    harness.run()


def test_the_first_child_of_a_beam_keeps_its_row_and_blocks() -> None:
    harness = Harness(make_memory(60), max_num_seqs=3)
    leader = harness.add("a", 9, params=DecodingParams(10, beam_width=3))
    harness.step()
    while harness.scheduler.has_unfinished:
        before = {id(beam): beam.row for beam in beams(harness, leader)}
        plan = harness.step()
        if harness.scheduler.has_unfinished:
            assert {id(beam): beam.row for beam in beams(harness, leader)} == before
        forked = {fork.row for fork in plan.forks}
        assert not forked & {fork.source_row for fork in plan.forks}
        assert forked & set(plan.release) == set(plan.release), "a row is dropped to be forked to"
    harness.check_answers()


def test_only_tokens_that_are_not_the_likeliest_travel() -> None:
    harness = Harness(make_memory(60), max_num_seqs=3)
    leader = harness.add("a", 9, params=DecodingParams(10, beam_width=3))
    harness.step()
    edited = 0
    while harness.scheduler.has_unfinished:
        members = list(beams(harness, leader))
        place = len(members[0].token_ids) - 1
        plan = harness.step()
        assert all(edit.first_position == place for edit in plan.token_edits)
        assert all(len(edit.token_ids) == 1 for edit in plan.token_edits)
        assert len(plan.token_edits) < 3, "the best child of a beam is its likeliest token"
        edited += len(plan.token_edits)
    assert edited > 0
    harness.check_answers()


def test_the_hypotheses_come_whole_best_first_at_the_end() -> None:
    harness = Harness(make_memory(60), max_num_seqs=3, model=FakeModel(end_rate=0.2))
    params = DecodingParams(10, beam_width=3, end_token_ids=(0,), length_penalty=0.5)
    harness.add("a", 9, params=params)
    outputs = []
    while harness.scheduler.has_unfinished:
        harness.launch()
        outputs += harness.land()
    assert [output.branch_index for output in outputs] == [0, 1, 2]
    assert all(output.cumulative_logprob is not None for output in outputs)
    harness.check_answers()


def test_a_prompt_that_is_cached_is_not_computed_again_for_beams() -> None:
    harness = Harness(make_memory(60))
    harness.add("first", [*range(1, 12)], 1)
    harness.run()
    leader = harness.add("a", [*range(1, 11), 50], params=DecodingParams(4, beam_width=2))
    assert harness.step().num_tokens == 1
    harness.run()
    assert leader.num_cached_tokens == 10
    assert {harness.ended[key].num_cached_tokens for key in ("a", "a/1")} == {10}


@pytest.mark.parametrize("policy", [PriorityPolicy, FairPolicy])
@pytest.mark.parametrize("is_ahead", [False, True])
def test_searches_beside_others_in_little_memory(is_ahead: bool, policy: type) -> None:
    harness = greedy_harness(make_memory(24), max_num_seqs=5, policy=policy(), budget=16)
    for index in range(4):
        harness.add(
            f"beams{index}",
            5 + index,
            params=DecodingParams(9, beam_width=1 + index),
            priority=index,
        )
        harness.add_branches(f"r{index}", 6, 9, n=2, priority=3 - index)
    (run_ahead if is_ahead else Harness.run)(harness)
    assert harness.scheduler.running_set.stats.num_preemptions > 0


def test_a_search_is_preempted_whole_and_comes_back_with_what_it_kept() -> None:
    harness = greedy_harness(make_memory(20), max_num_seqs=4, policy=PriorityPolicy())
    leader = harness.add("a", 9, params=DecodingParams(8, beam_width=3), priority=5)
    for _ in range(3):
        harness.step()
    members = list(beams(harness, leader))
    num_held = harness.memory.pool.num_held
    high = harness.add("high", 69, 2, priority=0)
    harness.step()
    assert high.state is RUNNING
    assert [member.state for member in members] == [PREEMPTED] * 3
    assert 0 < harness.memory.pool.num_held - 18 < num_held
    harness.run()


def test_beams_that_have_reported_wait_for_one_that_finds_no_row() -> None:
    harness = Harness(make_memory(60), max_num_seqs=4)
    harness.add("x", 5, 6)
    harness.add("y", 5, 6)
    leader = harness.add("a", 9, params=DecodingParams(6, beam_width=3))
    harness.step()
    states = [beam.state for beam in beams(harness, leader)]
    assert states.count(RUNNING) == 2 and states.count(PREEMPTED) == 1
    plan = harness.step()
    assert plan.num_tokens == 4
    plan = harness.step()
    assert sum(chunk.num_new_tokens == 0 for chunk in plan.chunks) == 2, "they wait"
    assert len({len(beam.token_ids) for beam in beams(harness, leader)}) == 1
    harness.run()


@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("block_size", [1, 2, 4])
def test_a_search_that_only_just_fits_ends(block_size: int, width: int) -> None:
    """Even if it is preempted in the middle."""
    num_tokens = 7 + 9
    num_blocks = width * -(-(num_tokens - 1) // block_size)
    harness = greedy_harness(
        make_memory(num_blocks, block_size), max_num_seqs=width, policy=PriorityPolicy(), budget=8
    )
    harness.add("a", 7, params=DecodingParams(9, beam_width=width), priority=5)
    for index in range(4):
        for _ in range(1 + index):
            harness.step()
        harness.add(f"high{index}", 2 + index, 3, priority=0)
    harness.run()


@pytest.mark.parametrize("num_steps", range(6))
def test_an_abort_ends_the_whole_search_in_any_state(num_steps: int) -> None:
    harness = Harness(make_memory(60), max_num_seqs=4)
    leader = harness.add("a", 9, params=DecodingParams(8, beam_width=4))
    harness.add("b", 5, 12)
    for _ in range(num_steps):
        harness.step()
    members = list(beams(harness, leader))
    harness.scheduler.abort(members[-1])
    harness.check()
    assert all(beam.is_finished for beam in [leader, *members])
    harness.run()


@pytest.mark.parametrize("ahead", [1, 2])
@pytest.mark.parametrize("fails_at", range(1, 8))
def test_a_search_survives_failed_steps(fails_at: int, ahead: int) -> None:
    harness = greedy_harness(make_memory(20), max_num_seqs=4)
    harness.add("a", 9, params=DecodingParams(8, beam_width=3))
    harness.add("b", 5, 12)
    for _ in range(fails_at):
        harness.step()
    for _ in range(ahead):
        plan = harness.scheduler.schedule(0.0)
        if plan is not None:
            launch(harness.runner, plan)
    harness.runner.reset()
    assert harness.scheduler.recover(None) == []
    harness.check()
    harness.run()


def test_a_beam_that_fails_ends_its_search_with_as_many_answers_as_were_asked_for() -> None:
    harness = Harness(make_memory(60), max_num_seqs=4)
    harness.add("a", 9, params=DecodingParams(8, beam_width=3))
    harness.add("b", 5, 4)
    harness.step()
    plan = harness.launch()
    result = harness.runner.result()
    leader_row = 0
    place = list(result.rows).index(leader_row)
    broken = type(result)(
        plan.step_id,
        [row for row in result.rows if row != leader_row],
        [ids for index, ids in enumerate(result.token_ids) if index != place],
        {row: entries for row, entries in result.logprobs.items() if row != leader_row},
        {},
        {leader_row: "NaN"},
    )
    outputs = harness.take_in(broken)
    failed = [output for output in outputs if output.request_id == "a"]
    assert [(output.branch_index, output.finish_reason, output.error) for output in failed] == [
        (index, FinishReason.ERROR, "NaN") for index in range(3)
    ]
    assert not failed[0].token_ids and NEVER_ENDS is harness.model
    harness.run()
