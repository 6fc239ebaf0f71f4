"""Which sequences are admitted, in which order, and what they take from others."""

import pytest
from tests.core.harness import Harness, greedy_harness, make_memory
from tests.core.scheduling.test_in_flight import run_ahead

from quire.core.sampling_params import DecodingParams
from quire.core.scheduling.admission import MAX_OVERTAKEN, MAX_PASSED_OVER
from quire.core.scheduling.policy import FairPolicy, LongestPrefixPolicy, PriorityPolicy
from quire.core.sequence import Sequence, SequenceState

RUNNING, WAITING, PREEMPTED = (
    SequenceState.RUNNING,
    SequenceState.WAITING,
    SequenceState.PREEMPTED,
)

# ---- what does not fit --------------------------------------------------------------------------


def crowded() -> Harness:
    """Two of eight blocks are free for long."""
    harness = Harness(make_memory(num_blocks=8), max_num_seqs=3)
    harness.add("a", 17, 4)
    harness.step()
    assert harness.memory.pool.num_free == 3
    return harness


def test_smaller_ones_pass_one_that_finds_no_room() -> None:
    harness = crowded()
    large, small = harness.add("large", 25, 1), harness.add("small", 1, 1)
    harness.step()
    assert (large.state, small.is_finished) == (WAITING, True)
    assert large.num_overtaken == 1
    harness.run()


def test_a_sequence_overtaken_often_enough_is_passed_no_more() -> None:
    harness = crowded()
    large = harness.add("large", 25, 1)
    large.num_overtaken = MAX_OVERTAKEN
    small = harness.add("small", 1, 1)
    harness.step()
    assert (large.state, small.state) == (WAITING, WAITING)
    assert list(harness.scheduler.waiting) == [large, small]
    harness.run()
    assert list(harness.ended) == ["a", "large", "small"]


def test_under_a_stream_of_small_ones_a_large_one_waits_for_a_bounded_number() -> None:
    harness = Harness(make_memory(num_blocks=8), max_num_seqs=3)
    for index in range(3):
        harness.add(f"s{index}", 3, 3 + index)
    harness.step()
    large = harness.add("large", 25, 4)
    num_later = 0
    while large.state is WAITING:
        harness.add(f"later{num_later}", 3, 4)
        num_later += 1
        harness.step()
        assert num_later < 4 * MAX_OVERTAKEN
    num_started = sum(bool(harness.received[f"later{index}"]) for index in range(num_later))
    assert large.num_overtaken == MAX_OVERTAKEN == num_started
    harness.run()


def test_admission_passes_over_a_bounded_number_per_step() -> None:
    harness = crowded()
    larges = [harness.add(f"large{index}", 25, 1) for index in range(MAX_PASSED_OVER)]
    small = harness.add("small", 1, 1)
    harness.step()
    assert small.state is WAITING and all(large.num_overtaken == 0 for large in larges)
    harness.scheduler.abort(larges[0])
    harness.step()
    assert small.is_finished and all(large.num_overtaken == 1 for large in larges[1:])
    harness.run()


def test_no_sequence_overtakes_a_preempted_one() -> None:
    harness = greedy_harness(make_memory(num_blocks=7), max_num_seqs=3)
    harness.add("a", 14, 12)
    victim = harness.add("b", 8, 8)
    while victim.state is not PREEMPTED:
        harness.step()
    small = harness.add("small", 1, 1)
    while victim.state is PREEMPTED:
        assert small.state is WAITING
        harness.step()
    harness.run()


# ---- whose blocks it takes ----------------------------------------------------------------------


def test_a_new_one_takes_from_running_ones_only_if_the_policy_lets_it() -> None:
    for policy, expected in ((PriorityPolicy(), RUNNING), (FairPolicy(), WAITING)):
        harness = Harness(make_memory(num_blocks=8), policy=policy)
        low = harness.add("low", 24, 4, priority=5)
        harness.step()
        high = harness.add("high", 12, 4, priority=0)
        harness.step()
        assert high.state is expected
        assert (low.state is PREEMPTED) == (expected is RUNNING)
        harness.run()


def test_no_sequence_is_preempted_if_that_makes_no_room() -> None:
    harness = Harness(make_memory(num_blocks=8), policy=PriorityPolicy())
    harness.add("first", 16, 8, priority=0)
    harness.add("last", 8, 4, priority=9)
    harness.step()
    running = list(harness.scheduler.running)
    big = harness.add("big", 24, 4, priority=5)  # needs more than "last" could give back
    for _ in range(2):
        harness.step()
    assert harness.scheduler.running == running
    assert harness.scheduler.running_set.stats.num_preemptions == 0
    harness.run()
    assert big.is_finished


def test_a_sequence_that_just_fits_is_admitted_though_a_partial_hit_costs_a_block() -> None:
    harness = Harness(make_memory(num_blocks=4))
    harness.add("a", list(range(1, 17)), 1)
    harness.run()
    for name, prompt in (("same", range(1, 17)), ("other", [*range(1, 15), 99])):
        sequence = harness.add(name, list(prompt), 1)
        harness.run()
        assert sequence.num_cached_tokens == 12


# ---- growth -------------------------------------------------------------------------------------


@pytest.mark.parametrize("forecasts", [True, False])
def test_under_steady_overload_a_forecast_makes_preemptions_rare(forecasts: bool) -> None:
    """Twice as many rows as there is memory for, and some sequence always waits."""
    make = Harness if forecasts else greedy_harness
    harness = make(make_memory(num_blocks=64, caching=False), max_num_seqs=16, budget=64)
    num_added = 0
    for _ in range(600):
        while len(harness.scheduler.waiting) < 4:
            harness.add(f"r{num_added}", 8 + num_added % 7, 16 + num_added * 5 % 9)
            num_added += 1
        harness.step()
    num_admitted = num_added - len(harness.scheduler.waiting)
    num_preemptions = harness.scheduler.running_set.stats.num_preemptions
    assert num_admitted > 150
    if forecasts:
        assert num_preemptions < 0.05 * num_admitted
        # And it is not bought with idle memory.
        assert harness.memory.pool.num_held > 0.6 * 64
    else:
        assert num_preemptions > 0.1 * num_admitted
    harness.run()


# ---- followers ----------------------------------------------------------------------------------


def follow(harness: Harness, num_tokens: int = 24) -> tuple[Sequence, Sequence]:
    prompt = list(range(1, num_tokens + 1))
    return harness.add("leader", prompt, 4), harness.add("follower", [*prompt, 99], 4)


@pytest.mark.parametrize("run", [Harness.run, run_ahead])
def test_the_second_of_two_equal_prompts_follows_the_first(run: object) -> None:
    harness = Harness(make_memory(num_blocks=30), budget=8)
    leader, follower = follow(harness)
    num_tokens = 0
    while follower.state is WAITING:
        plan = harness.step()
        num_tokens += plan.num_tokens
        assert leader.is_finished or leader.state is RUNNING
    assert follower.num_cached_tokens == 24
    assert num_tokens <= 24 + 4 + 1, "the prompt is computed once"
    assert callable(run)
    run(harness)


def test_a_follower_takes_over_where_its_leader_is_aborted() -> None:
    harness = Harness(make_memory(num_blocks=30), budget=8)
    leader, follower = follow(harness)
    harness.step()
    harness.step()
    assert (leader.num_computed_tokens, follower.state) == (16, WAITING)
    harness.scheduler.abort(leader)
    plan = harness.step()
    assert follower.state is RUNNING
    assert plan.admit[0].num_computed_tokens == follower.num_cached_tokens == 16
    third = harness.add("third", [*range(1, 25), 98], 4)
    harness.step()
    assert third.state in (WAITING, RUNNING) and third.num_cached_tokens in (0, 24)
    harness.run()
    assert third.num_cached_tokens == 24


def test_a_follower_takes_over_where_its_leader_is_preempted() -> None:
    harness = greedy_harness(
        make_memory(num_blocks=9), budget=8, policy=PriorityPolicy(), max_num_seqs=2
    )
    leader, follower = follow(harness)
    harness.step()
    harness.add("high", 24, 1, priority=-1)
    harness.run()
    assert leader.is_finished and follower.is_finished


def test_others_go_ahead_of_one_that_only_follows() -> None:
    harness = Harness(make_memory(num_blocks=40), budget=16)
    _, follower = follow(harness)
    other = harness.add("other", 4, 1)
    harness.step()
    harness.step()
    assert other.is_finished and follower.num_overtaken == 0
    harness.run()


def test_a_prompt_of_another_domain_is_not_followed() -> None:
    harness = Harness(make_memory(num_blocks=40), budget=64)
    first = harness.add("a", list(range(1, 25)), 4, domain="a")
    second = harness.add("b", list(range(1, 25)), 4, domain="b")
    plan = harness.step()
    assert (first.state, second.state, plan.num_tokens) == (RUNNING, RUNNING, 48)
    harness.run()


def test_requests_with_prompt_logprobs_follow_no_leader() -> None:
    harness = Harness(make_memory(num_blocks=40), budget=64)
    prompt = list(range(1, 25))
    harness.add("a", prompt, 4)
    harness.add("b", prompt, params=DecodingParams(4, prompt_logprobs=1))
    assert harness.step().num_tokens == 48
    harness.run()


def test_the_longest_prefix_comes_first() -> None:
    harness = Harness(make_memory(num_blocks=40), policy=LongestPrefixPolicy(), max_num_seqs=1)
    harness.add("first", list(range(1, 21)), 1)
    harness.run()
    harness.add("none", [90] * 21, 2)
    harness.add("some", [*range(1, 9), 90, 91], 2)
    harness.add("all", [*range(1, 21), 90], 2)
    harness.run()
    assert list(harness.ended) == ["first", "all", "some", "none"]
