"""Who gives way when blocks or rows run out, and that everyone ends all the same."""

import pytest
from tests.core.harness import Harness, make_memory

from quire.core.policy import priority
from quire.core.sampling_params import DecodingParams
from quire.core.sequence import SequenceState

PREEMPTED, RUNNING = SequenceState.PREEMPTED, SequenceState.RUNNING


def test_the_last_ranked_gives_way() -> None:
    harness = Harness(make_memory(num_blocks=6))
    first, second = harness.add("a", 8, 14), harness.add("b", 7, 14)
    while second.state is not PREEMPTED:
        harness.step()
    assert first.state is RUNNING
    assert (second.row, second.block_tables, second.num_computed_tokens) == (None, (), 0)
    assert harness.scheduler.waiting == [second]
    assert harness.scheduler.stats.num_preemptions == 1
    harness.run()


def test_a_sequence_may_have_to_give_way_itself() -> None:
    harness = Harness(make_memory(num_blocks=6))
    harness.add("a", 7, 9)  # takes the sixth block
    last = harness.add("b", 10, 6)  # then needs its fourth one
    for _ in range(4):
        harness.step()
    assert last.state is PREEMPTED
    assert [one.request_id for one in harness.scheduler.running] == ["a"]
    harness.run()


def test_nothing_is_admitted_in_a_step_in_which_someone_gave_way_to_growth() -> None:
    harness = Harness(make_memory(num_blocks=8), max_num_seqs=4)
    for name in "abcd":
        harness.add(name, 6, 12)
    before = 0
    while harness.scheduler.has_unfinished:
        plan = harness.step()
        count = harness.scheduler.stats.num_preemptions
        assert count == before or not plan.admit
        before = count
    assert before > 0
    harness.check_answers()


def test_the_preempted_one_goes_on_from_its_own_cached_blocks() -> None:
    harness = Harness(make_memory(num_blocks=6))
    harness.add("a", 8, 10)
    victim = harness.add("b", 7, 14)
    while victim.state is not PREEMPTED:
        harness.step()
    while victim.state is not RUNNING:
        plan = harness.step()
    assert plan.admit[0].num_computed_tokens > 0
    assert plan.admit[0].num_prompt_tokens == 7
    assert list(plan.admit[0].token_ids) == victim.token_ids[: len(plan.admit[0].token_ids)]
    assert victim.num_cached_tokens == 0, "only what its first admission found counts as a hit"
    harness.run()


def test_recomputed_tokens_are_counted() -> None:
    harness = Harness(make_memory(num_blocks=6, caching=False))
    harness.add("a", 8, 10)
    victim = harness.add("b", 7, 14)
    while victim.state is not PREEMPTED:
        harness.step()
    # Its newest token was sampled, but never computed: that one is not lost.
    num_computed = victim.num_tokens - 1
    harness.run()
    assert harness.scheduler.stats.num_recomputed_tokens == num_computed


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("num_groups", [1, 2, 3])
def test_everyone_ends_in_the_smallest_pool(num_groups: int, caching: bool) -> None:
    harness = Harness(make_memory(5 * num_groups, 4, num_groups, caching), budget=5)
    for index in range(12):
        harness.add(f"r{index}", 1 + 5 * index % 11, 9)
    harness.run()


# ---- priority -----------------------------------------------------------------------------------


def test_a_higher_priority_takes_the_only_row_at_once() -> None:
    harness = Harness(policy=priority, max_num_seqs=1, budget=16)
    low = harness.add("low", 3, 8, priority=5)
    harness.step()
    high = harness.add("high", 3, 8, priority=1)
    plan = harness.step()
    assert (low.state, high.state) == (PREEMPTED, RUNNING)
    assert (plan.release, [one.row for one in plan.admit]) == ((0,), [0])
    harness.run()


def test_a_higher_priority_takes_the_blocks_of_all_that_run() -> None:
    harness = Harness(make_memory(num_blocks=6), policy=priority)
    lows = [harness.add(f"low{index}", 7, 8, priority=5) for index in range(2)]
    harness.step()
    high = harness.add("high", 20, 4, priority=1)
    harness.step()
    assert high.state is RUNNING
    assert [low.state for low in lows] == [PREEMPTED, PREEMPTED]
    harness.run()


def test_as_few_as_needed_give_way_from_the_end() -> None:
    harness = Harness(make_memory(num_blocks=8), policy=priority)
    lows = [harness.add(f"low{index}", 7, 4, priority=5) for index in range(3)]
    harness.step()
    harness.add("high", 7, 4, priority=1)
    harness.step()
    assert [low.state for low in lows] == [RUNNING, RUNNING, RUNNING]  # two blocks were free
    harness.add("higher", 7, 4, priority=0)
    harness.step()
    assert [low.state for low in lows] == [RUNNING, RUNNING, PREEMPTED]
    harness.run()


def test_equal_priority_preempts_nobody() -> None:
    harness = Harness(policy=priority, max_num_seqs=1, budget=16)
    harness.add("a", 3, 4, priority=1)
    harness.step()
    harness.add("b", 3, 4, priority=1)
    harness.add("c", 3, 4, priority=2)
    harness.run()
    assert harness.scheduler.stats.num_preemptions == 0
    assert list(harness.ended) == ["a", "b", "c"]


def test_growth_takes_from_the_lowest_priority_not_the_youngest() -> None:
    harness = Harness(make_memory(num_blocks=4), policy=priority)
    low = harness.add("low", 7, 9, priority=5)
    harness.step()
    high = harness.add("high", 7, 9, priority=1)
    while low.state is RUNNING:
        harness.step()
        assert high.state is not PREEMPTED
    harness.run()
    assert list(harness.ended) == ["high", "low"]


def test_the_first_ranked_is_never_preempted() -> None:
    harness = Harness(make_memory(num_blocks=7), policy=priority)
    for index in range(10):
        harness.add(f"r{index}", 3 + index, 9, priority=index % 3)
    while harness.scheduler.has_unfinished:
        first = min(
            [*harness.scheduler.running, *harness.scheduler.waiting], key=lambda one: one.rank
        )
        was_running = first.state is RUNNING
        harness.step()
        assert not was_running or first.state is not PREEMPTED
    harness.check_answers()


# ---- log-probabilities of prompts ---------------------------------------------------------------


@pytest.mark.parametrize("budget", [4, 5, 7, 64])
def test_prompt_logprobs_survive_chunks_and_preemption(budget: int) -> None:
    harness = Harness(make_memory(num_blocks=8), budget=budget)
    for index in range(6):
        params = DecodingParams(9, seed=index, prompt_logprobs=index % 3, logprobs=1)
        harness.add(f"r{index}", 3 + 3 * index, params=params)
    outputs = []
    while harness.scheduler.has_unfinished:
        harness.launch()
        outputs += harness.land()
    assert harness.scheduler.stats.num_preemptions > 0
    firsts = {one.request_id: one for one in reversed(outputs)}
    for name, (request, _) in harness.requests.items():
        assert (
            firsts[name].prompt_logprobs == harness.model.expected_output(request).prompt_logprobs
        )
    assert sum(one.prompt_logprobs is not None for one in outputs) == 6


def test_prompt_logprobs_are_not_doubled_by_a_preemption_before_the_last_prompt_token() -> None:
    """All entries are there, but no token yet: what is computed again brings them again."""
    harness = Harness(make_memory(num_blocks=8), policy=priority, budget=16, max_num_seqs=1)
    params = DecodingParams(3, prompt_logprobs=0)
    low = harness.add("low", 17, params=params, priority=5)
    harness.step()
    assert (low.num_computed_tokens, len(low.prompt_logprobs)) == (16, 16)
    harness.add("high", 3, 2, priority=1)
    harness.step()
    assert low.state is PREEMPTED
    harness.memory.clear_cache()
    while harness.scheduler.has_unfinished:
        harness.launch()
        for output in harness.land():
            if output.request_id == "low" and len(harness.received["low"]) == 1:
                expected = harness.model.expected_output(harness.requests["low"][0])
                assert output.prompt_logprobs == expected.prompt_logprobs
    harness.check_answers()


def test_nobody_is_preempted_where_that_would_not_make_room() -> None:
    harness = Harness(make_memory(num_blocks=8), policy=priority)
    harness.add("first", 16, 8, priority=0)
    harness.add("last", 8, 4, priority=9)
    harness.step()
    running = list(harness.scheduler.running)
    assert len(running) == 2
    big = harness.add("big", 24, 4, priority=5)  # needs more than "last" could give back
    for _ in range(2):
        harness.step()
    assert harness.scheduler.running == running
    assert harness.scheduler.stats.num_preemptions == 0
    harness.run()
    assert big.is_finished
