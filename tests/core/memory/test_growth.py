"""What each kind of group needs, keeps and serves."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.core.hybrid_serving import FULL, state, window

from quire.core.memory.growth import Growth, WindowRule
from quire.core.step import HOLE_BLOCK

SIZE = 4
HYBRID = Growth((FULL, window(10), state(3)), SIZE)
FULL_RULE, WINDOW_RULE, STATE_RULE = HYBRID.rules


def test_blocks_of_each_rule_by_tokens() -> None:
    lengths = [0, 1, 4, 5, 40, 400]
    assert [FULL_RULE.most_blocks(n) for n in lengths] == [0, 1, 1, 2, 10, 100]
    # ceil(10 / 4) + 2, and a block for each of two steps.
    assert [WINDOW_RULE.most_blocks(n) for n in lengths] == [0, 1, 1, 2, 7, 7]
    assert [STATE_RULE.most_blocks(n) for n in lengths] == [3] * 6
    assert [HYBRID.most_blocks(n) for n in lengths] == [3, 5, 5, 7, 20, 110]
    assert HYBRID.all_most_blocks(lengths) == 150
    full = Growth((FULL, FULL), SIZE)
    assert full.all_most_blocks(lengths) == sum(map(full.most_blocks, lengths)) == 2 * 114
    assert HYBRID.most_to_hold(40) == 20 + 3 + 2, "a state and parts of two blocks to go on from"
    assert HYBRID.most_to_hold(400, num_together=400) == 200 + 3 + 3 + 2
    assert Growth((FULL, FULL), SIZE).most_to_hold(40) == 20, "a part can be left out"


def test_tables_begin_with_all_known_tokens_or_with_the_first_block_to_compute() -> None:
    assert FULL_RULE.num_reserved(40, end=8) == 10
    assert WINDOW_RULE.num_reserved(40, end=8) == 2
    assert STATE_RULE.num_reserved(40, end=8) == 3


@given(st.integers(1, 40), st.integers(0, 200), st.sampled_from([1, 2, 4, 16]))
def test_a_window_needs_the_keys_of_the_next_query(size: int, count: int, block: int) -> None:
    """The query at position `count` sees itself and the size - 1 before it."""
    first = WindowRule(0, block, size).first_needed(count)
    seen = range(max(0, count - size + 1), count + 1)
    assert first == seen[0] // block


@given(st.integers(1, 40), st.lists(st.booleans(), max_size=30), st.sampled_from([1, 4]))
def test_the_longest_prefix_that_a_window_serves(size: int, there: list[bool], block: int) -> None:
    rule = WindowRule(0, block, size)

    def serves(count: int) -> bool:
        return all(there[rule.first_needed(count * block) : count])

    expected = max(count for count in range(len(there) + 1) if serves(count))
    asked: list[int] = []
    found = rule.longest(len(there), lambda count: bool(asked.append(count)) or there[count - 1])
    assert found == expected
    assert len(asked) <= len(there), "each block is looked up once at most"


def test_a_state_serves_only_where_a_snapshot_was_left() -> None:
    assert STATE_RULE.longest(9, lambda count: count in (2, 7)) == 7
    assert STATE_RULE.longest(6, lambda count: count in (2, 7)) == 2
    assert STATE_RULE.longest(1, lambda count: count in (2, 7)) == 0


@pytest.mark.parametrize(
    ("num_tokens", "can_keep"), [(40, True), (39, False), (36, False), (0, False)]
)
def test_a_state_can_not_be_cut(num_tokens: int, can_keep: bool) -> None:
    assert STATE_RULE.can_keep([5, 6, 7], num_tokens, 40) == can_keep


def test_a_window_can_be_cut_to_where_it_still_has_what_is_read() -> None:
    table = [HOLE_BLOCK] * 5 + [1, 2, 3, 4, 5]  # of 40 tokens; from 20 on
    assert [n for n in range(41) if WINDOW_RULE.can_keep(table, n, 40)] == [0, *range(29, 41)]


def test_rewritten_entries() -> None:
    assert [list(FULL_RULE.rewritten(n)) for n in (0, 3, 4, 5)] == [[], [0], [], [1]]
    assert [list(STATE_RULE.rewritten(n)) for n in (0, 1)] == [[], [0, 1, 2]]


def test_the_group_of_the_tree_keeps_all_tokens_if_any_does() -> None:
    assert Growth((window(8), FULL), SIZE).main == 1
    assert Growth((window(8), state(1)), SIZE).main == 0
    assert Growth((state(1),), SIZE).main is None


def test_held_entries_are_counted_without_holes() -> None:
    assert HYBRID.num_held(([1, 2], [HOLE_BLOCK, 3], [4, 5, 6])) == 6
    assert HYBRID.num_held(()) == 0
