"""Slots for one more token: blocks reserved ahead, and given up first."""

import pytest
from tests.core.harness import Harness, greedy_harness, make_memory

from quire.core.sampling_params import DecodingParams
from quire.core.step import EditKind


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


def test_one_that_is_to_be_forked_from_and_beams_reserve_nothing() -> None:
    harness = Harness(make_memory(60), max_num_seqs=4, num_lookahead_blocks=4)
    leader = harness.add("beams", 4, params=DecodingParams(8, beam_width=2))
    parent = harness.add("a", 4, 20)
    harness.step()
    harness.fork(parent, 1)
    harness.step()
    assert parent.num_slots == 8
    assert all(beam.num_slots == 8 for beam in harness.scheduler.beams.members_with(leader))
    harness.run()
