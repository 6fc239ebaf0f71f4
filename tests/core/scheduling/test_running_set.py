"""Which sequences are preempted when blocks or rows run out; all still end."""

import pytest
from tests.core.harness import Harness, greedy_harness, make_groups, make_memory
from tests.core.memory.tiers.slow_tiers import SlowTiers

from quire.core.memory.kv_cache_manager import KVCacheConfig, KVCacheManager
from quire.core.sampling_params import DecodingParams
from quire.core.scheduling.policy import PriorityPolicy
from quire.core.sequence import Sequence, SequenceState
from quire.core.step import EditKind, StepPlan

PREEMPTED, RUNNING = SequenceState.PREEMPTED, SequenceState.RUNNING


def step_until(harness: Harness, sequence: Sequence, state: SequenceState) -> StepPlan:
    """Step until it is in that state; the last plan."""
    plan = harness.step()
    while sequence.state is not state:
        plan = harness.step()
    return plan


def num_blocks(sequence: Sequence) -> int:
    return sum(map(len, sequence.block_tables))


# ---- as few blocks as needed, from the last-ranked ----------------------------------------------


def test_the_last_ranked_gives_way_and_keeps_all_but_its_tail() -> None:
    harness = greedy_harness(make_memory(num_blocks=6))
    first, second = harness.add("a", 8, 14), harness.add("b", 7, 14)
    step_until(harness, second, PREEMPTED)
    assert (first.state, second.row) == (RUNNING, None)
    assert (num_blocks(first), num_blocks(second)) == (4, 2), "one block was needed"
    assert second.num_computed_tokens == 8 == second.num_slots
    assert list(harness.scheduler.waiting) == harness.scheduler.running_set.preempted == [second]
    assert harness.scheduler.running_set.stats.num_preemptions == 1
    harness.run()


@pytest.mark.parametrize("num_groups", [1, 2])
@pytest.mark.parametrize(
    ("num_wanted", "num_kept", "num_computed"), [(0, 4, 14), (1, 3, 12), (2, 2, 8), (9, 0, 0)]
)
@pytest.mark.parametrize("takes_all", [False, True])
def test_a_preemption_takes_what_is_needed_or_all(
    takes_all: bool, num_wanted: int, num_kept: int, num_computed: int, num_groups: int
) -> None:
    memory = make_memory(16 * num_groups, 4, num_groups, caching=False, preempts_whole=takes_all)
    harness = greedy_harness(memory)
    victim = harness.add("a", 13, 8)
    harness.step()
    harness.step()
    harness.scheduler.running_set.preempt(victim, num_wanted * num_groups)
    harness.check()
    assert victim.num_lost_tokens == 14
    assert num_blocks(victim) == (0 if takes_all else num_kept * num_groups)
    assert victim.num_computed_tokens == (0 if takes_all else num_computed)
    harness.run()
    lost = harness.scheduler.running_set.stats.num_recomputed_tokens
    assert lost == 14 - (0 if takes_all else num_computed)


def test_a_preempted_sequence_keeps_the_blocks_that_are_not_needed() -> None:
    harness = greedy_harness(make_memory(num_blocks=6))
    harness.add("a", 7, 9)  # takes the sixth block
    last = harness.add("b", 10, 6)  # then needs its fourth one
    for _ in range(4):
        harness.step()
    assert (last.state, num_blocks(last)) == (PREEMPTED, 3)
    assert [sequence.request_id for sequence in harness.scheduler.running] == ["a"]
    harness.run()


def test_first_reserves_then_kept_prefixes_then_tails_of_running_ones() -> None:
    harness = greedy_harness(
        make_memory(num_blocks=20, caching=False), policy=PriorityPolicy(), num_lookahead_blocks=2
    )
    running_set, pool = harness.scheduler.running_set, harness.memory.pool
    a, b, c = (harness.add(f"r{index}", 4, 20, priority=index) for index in range(3))
    kept = harness.add("kept", 12, 8, priority=9)
    harness.step()
    harness.step()
    running_set.preempt(kept, 0)
    # 2 of a, b, c are reserved.
    assert [num_blocks(sequence) for sequence in (a, b, c, kept)] == [4, 4, 4, 4]
    held = []
    for num_wanted in (4, 5, 7, 9, 11, 13, 15):
        assert running_set.reclaim(num_wanted, a, from_running=True)
        held.append((*(num_blocks(sequence) for sequence in (a, b, c, kept)), pool.num_free))
    assert held == [
        (4, 4, 4, 4, 4),
        (4, 4, 2, 4, 6),
        (4, 2, 2, 4, 8),
        (2, 2, 2, 4, 10),
        (2, 2, 2, 3, 11),
        (2, 2, 2, 1, 13),
        (2, 2, 1, 0, 15),
    ]
    assert (b.state, c.state) == (RUNNING, PREEMPTED)
    assert not running_set.reclaim(19, a, from_running=True), "all that the others have, no more"
    assert [num_blocks(sequence) for sequence in (a, b, c, kept)] == [2, 0, 0, 0]
    assert not running_set.reclaim(19, b, from_running=True), "nobody outranks the first"
    assert (a.state, num_blocks(a)) == (RUNNING, 2)
    harness.run()


def test_blocks_reserved_ahead_are_told_to_the_runner_when_taken() -> None:
    harness = greedy_harness(make_memory(num_blocks=12, num_groups=2), num_lookahead_blocks=1)
    sequence = harness.add("a", 4, 20)
    harness.step()
    plan = harness.step()
    assert [(edit.kind, len(edit.block_ids)) for edit in plan.table_edits] == [
        (EditKind.APPEND, 2)
    ] * 2
    assert harness.scheduler.running_set.reclaim(8, sequence, from_running=True)
    plan = harness.launch()
    assert [(edit.kind, edit.first_logical_block) for edit in plan.table_edits] == [
        (EditKind.TRUNCATE, 2)
    ] * 2
    harness.run()


def test_kept_prefixes_go_from_the_last_ranked_on_tail_first() -> None:
    harness = greedy_harness(make_memory(num_blocks=12, caching=False), policy=PriorityPolicy())
    olds = [harness.add(f"old{index}", 12, 8, priority=5 + index) for index in range(3)]
    harness.step()
    for sequence in reversed(olds):
        harness.scheduler.running_set.preempt(sequence, 0)
    assert [num_blocks(sequence) for sequence in olds] == [3, 3, 3]
    first = [sequence.block_tables[0][0] for sequence in olds]
    harness.add("high", 17, 8, priority=0)
    harness.step()
    assert [num_blocks(sequence) for sequence in olds] == [3, 3, 1]
    assert olds[2].block_tables[0] == [first[2]]
    assert olds[2].num_computed_tokens == 4
    harness.run()


def test_nothing_is_admitted_in_a_step_that_preempted_for_growth() -> None:
    harness = greedy_harness(make_memory(num_blocks=8), max_num_seqs=4)
    for name in "abcd":
        harness.add(name, 6, 12)
    before = 0
    while harness.scheduler.has_unfinished:
        plan = harness.step()
        count = harness.scheduler.running_set.stats.num_preemptions
        assert count == before or not plan.admit
        before = count
    assert before > 0
    harness.check_answers()


def test_the_preempted_one_goes_on_from_what_it_kept() -> None:
    harness = greedy_harness(make_memory(num_blocks=6, caching=False))
    harness.add("a", 8, 10)
    victim = harness.add("b", 7, 14)
    plan = step_until(harness, victim, PREEMPTED)
    while victim.state is not RUNNING:
        num_kept, kept = victim.num_computed_tokens, list(victim.block_tables[0])
        plan = harness.step()
    admission = plan.admit[0]
    assert admission.num_computed_tokens == num_kept > 0
    assert list(admission.block_tables[0][: len(kept)]) == kept
    assert admission.num_prompt_tokens == 7
    assert list(admission.token_ids) == victim.token_ids[: len(admission.token_ids)]
    harness.run()


def test_preempted_tails_come_back_from_the_cache_if_not_overwritten() -> None:
    """One more was taken than is needed at once, for the next growth of one that outranks both."""
    harness = greedy_harness(make_memory(num_blocks=18), policy=PriorityPolicy())
    harness.add("first", 5, 8, priority=0)
    low = harness.add("low", 40, 8, priority=9)
    harness.step()
    middle = harness.add("middle", 24, 1, priority=5)
    harness.step()
    assert (middle.is_finished, low.state, num_blocks(low)) == (True, PREEMPTED, 9)
    harness.run()
    assert harness.scheduler.running_set.stats.num_preemptions == 1
    assert harness.scheduler.running_set.stats.num_recomputed_tokens == 0


def test_recomputed_tokens_are_counted_as_far_as_they_were_lost() -> None:
    harness = greedy_harness(make_memory(num_blocks=6, caching=False))
    harness.add("a", 8, 10)
    victim = harness.add("b", 7, 14)
    step_until(harness, victim, PREEMPTED)
    stats = harness.scheduler.running_set.stats
    # Its newest token was sampled, but never computed: that one is not lost.
    assert stats.num_preempted_tokens == victim.num_tokens - 1
    while victim.state is not RUNNING:
        num_left = victim.num_computed_tokens
        harness.step()
    assert stats.num_recomputed_tokens == stats.num_preempted_tokens - num_left
    harness.run()


@pytest.mark.parametrize("preempts_whole", [True, False])
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("num_groups", [1, 2, 3])
def test_everyone_ends_in_the_smallest_pool(
    num_groups: int, caching: bool, preempts_whole: bool
) -> None:
    memory = make_memory(5 * num_groups, 4, num_groups, caching, preempts_whole=preempts_whole)
    harness = greedy_harness(memory, budget=5)
    for index in range(12):
        harness.add(f"r{index}", 1 + 5 * index % 11, 9)
    harness.run()
    assert harness.scheduler.running_set.stats.num_preemptions > 0


def test_taking_tails_recomputes_less_than_taking_all_does() -> None:
    recomputed = {}
    for preempts_whole in (True, False):
        memory = make_memory(num_blocks=60, caching=False, preempts_whole=preempts_whole)
        harness = greedy_harness(memory, max_num_seqs=8)
        for index in range(16):
            harness.add(f"r{index}", 30 + index % 9, 20)
        harness.run()
        recomputed[preempts_whole] = harness.scheduler.running_set.stats.num_recomputed_tokens
    assert 0 < recomputed[False] < recomputed[True] * 0.6  # 109 of 212 tokens


# ---- priority -----------------------------------------------------------------------------------


def test_a_higher_priority_takes_the_only_row_at_once() -> None:
    harness = Harness(policy=PriorityPolicy(), max_num_seqs=1, budget=16)
    low = harness.add("low", 3, 8, priority=5)
    harness.step()
    high = harness.add("high", 3, 8, priority=1)
    plan = harness.step()
    assert (low.state, high.state) == (PREEMPTED, RUNNING)
    assert (plan.release, [admission.row for admission in plan.admit]) == ((0,), [0])
    harness.run()


def test_a_higher_priority_takes_the_blocks_of_all_that_run() -> None:
    harness = greedy_harness(make_memory(num_blocks=6), policy=PriorityPolicy())
    lows = [harness.add(f"low{index}", 7, 8, priority=5) for index in range(2)]
    harness.step()
    high = harness.add("high", 20, 4, priority=1)
    harness.step()
    assert high.state is RUNNING
    assert [low.state for low in lows] == [PREEMPTED, PREEMPTED]
    harness.run()


def test_preemption_takes_as_few_sequences_as_needed_from_the_end() -> None:
    harness = greedy_harness(make_memory(num_blocks=8), policy=PriorityPolicy())
    lows = [harness.add(f"low{index}", 7, 4, priority=5) for index in range(3)]
    harness.step()
    assert harness.memory.pool.num_free == 2
    harness.add("high", 7, 4, priority=1)
    harness.step()
    assert [low.state for low in lows] == [RUNNING, RUNNING, RUNNING]
    harness.add("higher", 7, 4, priority=0)
    harness.step()
    assert [low.state for low in lows] == [RUNNING, RUNNING, PREEMPTED]
    harness.run()


def test_equal_priority_preempts_no_sequence() -> None:
    harness = Harness(policy=PriorityPolicy(), max_num_seqs=1, budget=16)
    harness.add("a", 3, 4, priority=1)
    harness.step()
    harness.add("b", 3, 4, priority=1)
    harness.add("c", 3, 4, priority=2)
    harness.run()
    assert harness.scheduler.running_set.stats.num_preemptions == 0
    assert list(harness.ended) == ["a", "b", "c"]


def test_growth_takes_from_the_lowest_priority_not_the_youngest() -> None:
    harness = Harness(make_memory(num_blocks=4), policy=PriorityPolicy())
    low = harness.add("low", 7, 9, priority=5)
    harness.step()
    high = harness.add("high", 7, 9, priority=1)
    while low.state is RUNNING:
        harness.step()
        assert high.state is not PREEMPTED
    harness.run()
    assert list(harness.ended) == ["high", "low"]


def test_the_first_ranked_is_never_preempted() -> None:
    harness = Harness(make_memory(num_blocks=7), policy=PriorityPolicy())
    for index in range(10):
        harness.add(f"r{index}", 3 + index, 9, priority=index % 3)
    while harness.scheduler.has_unfinished:
        first = min(
            [*harness.scheduler.running, *harness.scheduler.waiting],
            key=lambda sequence: sequence.rank,
        )
        was_running = first.state is RUNNING
        harness.step()
        assert not was_running or first.state is not PREEMPTED
    harness.check_answers()


# ---- log-probabilities of prompts ---------------------------------------------------------------


@pytest.mark.parametrize("budget", [4, 5, 7, 64])
def test_prompt_logprobs_survive_chunks_and_preemption(budget: int) -> None:
    harness = greedy_harness(make_memory(num_blocks=8), budget=budget)
    for index in range(6):
        params = DecodingParams(9, seed=index, prompt_logprobs=index % 3, logprobs=1)
        harness.add(f"r{index}", 3 + 3 * index, params=params)
    outputs = []
    while harness.scheduler.has_unfinished:
        harness.launch()
        outputs += harness.land()
    assert harness.scheduler.running_set.stats.num_preemptions > 0
    firsts = {output.request_id: output for output in reversed(outputs)}
    for name, (request, _) in harness.requests.items():
        assert (
            firsts[name].prompt_logprobs == harness.model.expected_output(request).prompt_logprobs
        )
    assert sum(output.prompt_logprobs is not None for output in outputs) == 6


def test_prompt_logprobs_are_not_doubled_by_a_preemption_before_the_last_prompt_token() -> None:
    """All entries are there, but no token yet: what is computed again brings them again."""
    harness = Harness(make_memory(num_blocks=8), policy=PriorityPolicy(), budget=16, max_num_seqs=1)
    params = DecodingParams(3, prompt_logprobs=0)
    low = harness.add("low", 17, params=params, priority=5)
    harness.step()
    assert (low.num_computed_tokens, len(low.prompt_logprobs)) == (16, 16)
    harness.add("high", 3, 2, priority=1)
    harness.step()
    assert low.state is PREEMPTED
    harness.memory.prefixes.clear()
    while harness.scheduler.has_unfinished:
        harness.launch()
        for output in harness.land():
            if output.request_id == "low" and len(harness.received["low"]) == 1:
                expected = harness.model.expected_output(harness.requests["low"][0])
                assert output.prompt_logprobs == expected.prompt_logprobs
    harness.check_answers()


def test_no_sequence_is_preempted_if_that_makes_no_room() -> None:
    harness = Harness(make_memory(num_blocks=8), policy=PriorityPolicy())
    harness.add("first", 16, 8, priority=0)
    harness.add("last", 8, 4, priority=9)
    harness.step()
    running = list(harness.scheduler.running)
    assert len(running) == 2
    big = harness.add("big", 24, 4, priority=5)  # needs more than "last" could give back
    for _ in range(2):
        harness.step()
    assert harness.scheduler.running == running
    assert harness.scheduler.running_set.stats.num_preemptions == 0
    harness.run()
    assert big.is_finished


# ---- slots to append to -------------------------------------------------------------------------


def appended(harness: Harness, num_steps: int) -> list[int]:
    """Blocks that each step's plan appends, of all groups."""
    return [
        sum(
            len(edit.block_ids)
            for edit in harness.step().table_edits
            if edit.kind is EditKind.APPEND
        )
        for _ in range(num_steps)
    ]


@pytest.mark.parametrize("num_groups", [1, 2])
@pytest.mark.parametrize(
    ("num_lookahead_blocks", "expected"),
    [
        (0, [0, 1, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 1, 0]),
        (1, [0, 2, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0]),
        (3, [0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]),
    ],
)
def test_several_blocks_are_reserved_in_one_operation(
    num_lookahead_blocks: int, expected: list[int], num_groups: int
) -> None:
    memory = make_memory(40 * num_groups, num_groups=num_groups)
    harness = Harness(memory, num_lookahead_blocks=num_lookahead_blocks)
    harness.add("a", 4, 40)
    assert appended(harness, 15) == [count * num_groups for count in expected]
    harness.run()


def test_no_more_is_reserved_than_it_can_ever_need() -> None:
    harness = Harness(make_memory(40), num_lookahead_blocks=9)
    sequence = harness.add("a", 4, 7)  # the last of 11 tokens is never written
    harness.step()
    harness.step()
    assert sequence.num_slots == 12
    harness.run()


@pytest.mark.parametrize(("num_free", "num_reserved"), [(1, 0), (4, 0), (5, 0), (6, 4), (20, 4)])
def test_nothing_is_reserved_unless_a_quarter_of_the_pool_is_free(
    num_free: int, num_reserved: int
) -> None:
    harness = greedy_harness(make_memory(20), num_lookahead_blocks=4)
    sequence = harness.add("a", 4, 30)
    harness.step()
    pool = harness.memory.pool
    taken, _ = pool.take(pool.num_free - min(num_free, pool.num_free))
    harness.scheduler.schedule(0.0)
    assert sequence.num_slots == 8 + 4 * num_reserved
    assert len(taken) + pool.num_free + 2 + num_reserved == 20


def test_reserves_are_given_up_before_anybody_is_preempted() -> None:
    harness = greedy_harness(make_memory(12, caching=False), num_lookahead_blocks=4)
    first = harness.add("a", 4, 24)
    harness.step()
    harness.step()
    assert first.num_slots == 24
    second = harness.add("b", 18, 10)
    for _ in range(7):
        harness.step()
    assert (second.num_slots, first.num_slots) == (24, 24)
    harness.step()
    assert (second.num_slots, first.num_slots, first.num_computed_tokens) == (28, 16, 13)
    assert harness.scheduler.running_set.stats.num_preemptions == 0
    harness.run()


def test_a_block_that_a_planned_token_goes_into_is_no_reserve() -> None:
    """The first gets a block and two ahead; the second, in the same step, takes those two back."""
    harness = greedy_harness(make_memory(8, caching=False), num_lookahead_blocks=2)
    first, second = harness.add("a", 8, 20), harness.add("b", 12, 9)
    harness.step()
    plan = harness.step()
    assert [edit.kind for edit in plan.table_edits] == [
        EditKind.APPEND,
        EditKind.TRUNCATE,
        EditKind.APPEND,
    ]
    assert (first.num_slots, second.num_slots) == (12, 16)
    assert (first.num_computed_tokens, second.num_computed_tokens) == (9, 13)
    harness.run()


def test_beams_and_sequences_to_be_forked_reserve_nothing() -> None:
    harness = Harness(make_memory(60), max_num_seqs=4, num_lookahead_blocks=4)
    leader = harness.add("beams", 4, params=DecodingParams(8, beam_width=2))
    parent = harness.add("a", 4, 20)
    harness.step()
    harness.fork(parent, 1)
    harness.step()
    assert parent.num_slots == 8
    assert all(beam.num_slots == 8 for beam in harness.scheduler.beams.members_with(leader))
    harness.run()


def test_no_store_is_given_up_where_reserves_are_enough() -> None:
    tiers = SlowTiers()
    config = KVCacheConfig(make_groups(2), 60, 4, True, b"secret", tiers=tiers)
    harness = greedy_harness(KVCacheManager(config), num_lookahead_blocks=1)
    harness.add("before", 13, 1)
    harness.run()
    sequence = harness.add("a", 4, 20)
    harness.step()
    harness.now_s += 2.0  # by now the stores may hang, and nothing counts on them
    harness.step()
    assert len(tiers.stores) > 2
    running_set, pool = harness.scheduler.running_set, harness.memory.pool
    assert running_set.reclaim(pool.num_free + 1, sequence, from_running=True)
    assert not tiers.cancelled
    assert not running_set.reclaim(pool.num_free + 1, sequence, from_running=True)
    assert len(tiers.cancelled) == 1
    tiers.takes_stores = False
    tiers.end(list(tiers.stores))
    harness.run()
