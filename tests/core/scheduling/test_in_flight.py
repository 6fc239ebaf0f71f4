"""Planning one step ahead, and ends, aborts and preemptions while a step runs."""

import pytest
from tests.core.harness import Harness, greedy_harness, launch, make_memory

from quire.core.request import FinishReason
from quire.core.sampling_params import DecodingParams
from quire.core.scheduling import invariants
from quire.core.scheduling.policy import PriorityPolicy
from quire.core.sequence import SequenceState
from quire.simulation.fakes.fake_model import FakeModel


def run_ahead(harness: Harness, max_num_steps: int = 2000) -> None:
    """Until the end, with one step planned and executed before the result of the last."""
    scheduler = harness.scheduler
    while scheduler.num_steps_in_flight > 1:
        harness.land()
    for _ in range(max_num_steps):
        plan = scheduler.schedule(0.0)
        harness.check()
        if plan is not None:
            launch(harness.runner, plan)
        if scheduler.num_steps_in_flight > 1 or (plan is None and scheduler.num_steps_in_flight):
            harness.land()
        if not scheduler.has_unfinished and not scheduler.num_steps_in_flight:
            break
    invariants.check_idle(scheduler)
    harness.check_answers()


def test_a_decoding_row_needs_no_word_while_its_token_is_still_to_come() -> None:
    harness = Harness()
    sequence = harness.add("a", 5, 9)
    harness.launch()
    plan = harness.launch()
    assert (plan.num_tokens, plan.chunks, plan.admit) == (1, (), ())
    assert (sequence.num_pending_tokens, sequence.num_tokens, len(sequence.token_ids)) == (2, 7, 5)
    harness.land()
    assert (sequence.num_pending_tokens, len(sequence.token_ids)) == (1, 6)
    run_ahead(harness)


def test_a_row_that_will_end_for_sure_pauses_and_nothing_is_planned_for_it_alone() -> None:
    harness = Harness()
    harness.add("a", 5, 1)
    harness.launch()
    assert harness.scheduler.schedule(0.0) is None
    harness.add("b", 5, 2)
    plan = harness.launch()
    assert {(chunk.row, chunk.num_new_tokens) for chunk in plan.chunks} == {(0, 0), (1, 5)}
    run_ahead(harness)


def test_an_end_token_ends_it_and_what_was_planned_beyond_is_dropped() -> None:
    harness = Harness(model=FakeModel(end_rate=0.3))
    for index in range(8):
        params = DecodingParams(30, seed=index, end_token_ids=(0,))
        harness.add(f"r{index}", 3, params=params)
    run_ahead(harness)
    assert FinishReason.STOP in {output.finish_reason for output in harness.ended.values()}


@pytest.mark.parametrize("num_groups", [1, 2])
def test_blocks_of_a_finished_sequence_stay_until_its_last_step_has_ended(num_groups: int) -> None:
    harness = Harness(
        make_memory(8 * num_groups, num_groups=num_groups), model=FakeModel(end_rate=1)
    )
    params = DecodingParams(9, end_token_ids=(0,))
    sequence = harness.add("a", 6, params=params)
    harness.launch()
    held = {block for table in sequence.block_tables for block in table}
    harness.launch()  # "a" is in this one too, though it ends with the step before
    harness.land()
    assert sequence.is_finished
    assert set(harness.memory.deferred.blocks()) == held
    harness.add("b", 9, params=params)
    plan = harness.launch()
    given = {block for table in plan.admit[0].block_tables for block in table}
    assert not given & held
    harness.land()
    assert harness.memory.deferred.num_blocks == 0
    run_ahead(harness)


def test_no_block_in_flight_is_given_out_in_a_full_pool() -> None:
    harness = Harness(make_memory(num_blocks=3), model=FakeModel(end_rate=1))
    params = DecodingParams(4, end_token_ids=(0,))
    harness.add("a", 9, params=params)
    harness.launch()
    harness.launch()
    harness.land()
    harness.add("b", 9, params=params)
    assert harness.scheduler.schedule(0.0) is None, "all blocks are held by the step in flight"
    harness.land()
    harness.launch()
    run_ahead(harness)


def test_a_row_pauses_while_what_is_given_back_may_be_enough() -> None:
    harness = greedy_harness(make_memory(num_blocks=4))
    a, b = harness.add("a", 3, 8), harness.add("b", 8, 4)
    harness.launch()
    harness.launch()  # "b" takes the last free block
    harness.land()
    harness.scheduler.abort(b)  # its three blocks come back when step 1 has ended
    assert harness.scheduler.schedule(0.0) is None
    assert (a.state, harness.scheduler.running_set.stats.num_preemptions) == (
        SequenceState.RUNNING,
        0,
    )
    harness.land()
    plan = harness.launch()
    assert plan.table_edits and a.num_slots == 8
    run_ahead(harness)


def test_a_preempted_sequence_still_gets_the_token_of_its_step_in_flight() -> None:
    harness = Harness(policy=PriorityPolicy(), max_num_seqs=1, budget=16)
    low = harness.add("low", 5, 6, priority=5)
    harness.launch()
    harness.add("high", 3, 3, priority=1)
    plan = harness.launch()
    assert low.state is SequenceState.PREEMPTED
    assert (plan.release, len(plan.admit)) == ((0,), 1)
    harness.land()
    assert harness.received["low"] == low.token_ids[5:] and len(low.token_ids) == 6
    run_ahead(harness)


def test_it_may_end_by_that_token() -> None:
    harness = Harness(
        policy=PriorityPolicy(), max_num_seqs=1, budget=16, model=FakeModel(end_rate=1)
    )
    low = harness.add("low", 5, params=DecodingParams(9, end_token_ids=(0,)), priority=5)
    harness.launch()
    harness.add("high", 3, 3, priority=1)
    harness.launch()
    harness.land()
    assert low.is_finished and harness.ended["low"].finish_reason is FinishReason.STOP
    run_ahead(harness)


def test_prompt_logprobs_are_whole_for_one_preempted_while_its_prompt_was_in_flight() -> None:
    harness = Harness(policy=PriorityPolicy(), max_num_seqs=1, budget=16)
    params = DecodingParams(3, prompt_logprobs=1)
    harness.add("low", 9, params=params, priority=5)
    harness.launch()
    harness.add("high", 3, 3, priority=1)
    harness.launch()
    (output,) = harness.land()
    expected = harness.model.expected_output(harness.requests["low"][0])
    assert output.request_id == "low"
    assert output.prompt_logprobs == expected.prompt_logprobs
    run_ahead(harness)


def test_two_steps_of_one_row_with_two_owners_are_kept_apart() -> None:
    harness = Harness(max_num_seqs=1, budget=16)
    a = harness.add("a", 5, 9)
    harness.launch()
    harness.scheduler.abort(a)
    harness.add("b", 5, 3)
    plan = harness.launch()
    assert (plan.release, plan.admit[0].row) == ((0,), 0)
    assert harness.land() == [], "what step 0 sampled belongs to nobody"
    run_ahead(harness)
    assert harness.received["a"] == []


# ---- aborts -------------------------------------------------------------------------------------


def test_abort_of_a_waiting_one() -> None:
    harness = Harness(max_num_seqs=1, budget=16)
    harness.add("a", 3, 3)
    harness.step()
    waiting = harness.add("b", 3, 3)
    harness.scheduler.abort(waiting)
    harness.check()
    assert waiting.is_finished and not len(harness.scheduler.waiting)
    harness.run()


def test_abort_of_a_running_one_frees_its_blocks_at_once_and_its_row_with_the_next_plan() -> None:
    harness = Harness()
    a, _ = harness.add("a", 9, 9), harness.add("b", 3, 3)
    harness.step()
    harness.scheduler.abort(a)
    harness.check()
    assert harness.memory.pool.num_held == 1
    assert harness.step().release == (0,)
    harness.run()


def test_abort_of_a_preempted_one() -> None:
    harness = greedy_harness(make_memory(num_blocks=6))
    harness.add("a", 8, 14)
    victim = harness.add("b", 7, 14)
    while victim.state is not SequenceState.PREEMPTED:
        harness.step()
    harness.scheduler.abort(victim)
    harness.check()
    harness.run()


def test_abort_in_flight_holds_its_blocks_until_the_step_has_ended() -> None:
    harness = Harness()
    a = harness.add("a", 9, 9)
    harness.launch()
    harness.scheduler.abort(a)
    harness.check()
    assert harness.memory.deferred.num_blocks == 3
    assert harness.land() == []
    assert harness.memory.pool.num_held == 0
    assert len(harness.memory.cache) == 0, "nothing of it was published after its end"
    invariants.check_idle(harness.scheduler)


def test_abort_of_one_preempted_in_flight() -> None:
    harness = Harness(policy=PriorityPolicy(), max_num_seqs=1, budget=16)
    low = harness.add("low", 5, 6, priority=5)
    harness.launch()
    harness.add("high", 3, 3, priority=1)
    harness.launch()
    harness.scheduler.abort(low)
    harness.check()
    run_ahead(harness)
    assert harness.received["low"] == []


def test_abort_twice_or_after_the_end_changes_nothing() -> None:
    harness = Harness()
    a = harness.add("a", 3, 1)
    harness.run()
    harness.scheduler.abort(a)
    assert a.finish_reason is FinishReason.LENGTH
    b = harness.add("b", 3, 3)
    harness.scheduler.abort(b)
    harness.scheduler.abort(b)
    assert b.finish_reason is FinishReason.ABORT
    invariants.check_idle(harness.scheduler)


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("num_groups", [1, 3])
def test_ahead_in_a_tiny_pool(num_groups: int, caching: bool) -> None:
    harness = greedy_harness(make_memory(6 * num_groups, 4, num_groups, caching), budget=5)
    for index in range(14):
        harness.add(f"r{index}", 1 + 5 * index % 12, 9)
    run_ahead(harness)
    assert harness.scheduler.running_set.stats.num_preemptions > 0
