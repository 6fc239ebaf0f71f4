"""What the fake runner reads of windows, latents and states, and what it refuses for them."""

from typing import Any

import pytest
from tests.core.harness import launch
from tests.simulation.test_fake_runner import MODEL, PARAMS, admit, expected, plan

from quire.core.kv_groups import KVGroup, KVKind
from quire.core.step import (
    HOLE_BLOCK,
    BlockCopy,
    Chunk,
    EditKind,
    RowFork,
    StepPlan,
    TableEdit,
)
from quire.simulation.fakes.fake_runner import FakeRunner

APPEND, REPLACE, CUT, HOLE = EditKind.APPEND, EditKind.REPLACE, EditKind.TRUNCATE, EditKind.HOLE
FULL, LATENT = KVGroup((0,), KVKind.FULL, 64), KVGroup((1,), KVKind.LATENT, 64)
STATE = KVGroup((2,), KVKind.STATE, 64, None, 2)
TOKENS = [1, 2, 3, 4, 5, 6]
ROW_1 = "row 1 goes on from a wrong state in group 1, page 0"


def window(size: int) -> KVGroup:
    return KVGroup((3,), KVKind.WINDOW, 64, size)


def make(*groups: KVGroup) -> FakeRunner:
    return FakeRunner(groups, 16, 4, max_num_rows=3, max_num_tokens=40, model=MODEL)


def go(runner: FakeRunner, *given: int, **parts: Any) -> None:
    """One step, and its result."""
    launch(runner, plan(*given, **parts))
    runner.result()


def started() -> FakeRunner:
    """Row 0 is live: 6 tokens computed, one sampled, K and V in blocks 0, 1, its state in 4, 5."""
    runner = make(FULL, STATE)
    go(runner, 0, 1, 6, admit=[admit(0, TOKENS, (0, 1), (4, 5))], chunks=[Chunk(0, 6)])
    return runner


def copied(*pairs: tuple[int, int]) -> list[BlockCopy]:
    return [BlockCopy(*pair) for pair in pairs]


def follower(pages: tuple[int, int], computed: int = 6, tail: int = 77) -> Any:
    """Row 1 goes on after the tokens of row 0, in a copy of its second block."""
    return admit(1, [*TOKENS, tail], (0, 2), pages, computed=computed)


# ---- states -------------------------------------------------------------------------------------


def test_a_state_is_carried_from_step_to_step_and_gives_the_tokens_of_the_request() -> None:
    runner = make(FULL, STATE, LATENT)
    admission = admit(0, TOKENS, (0, 1), (4, 5), (2, 3))
    launch(runner, plan(0, 1, 4, admit=[admission], chunks=[Chunk(0, 4)]))
    launch(runner, plan(1, 1, 2, chunks=[Chunk(0, 2)]))
    runner.result()
    launch(runner, plan(2, 1, 1))
    tokens = [runner.result().token_ids[0][0], runner.result().token_ids[0][0]]
    assert tokens == expected(TOKENS, 2)


def test_a_copy_of_a_state_is_gone_on_from() -> None:
    runner = started()
    copies = copied((1, 2), (4, 6), (5, 7))
    go(runner, 1, 2, 1, admit=[follower((6, 7))], copies=copies, chunks=[Chunk(0, 0)])
    go(runner, 2, 2, 2)


def test_a_row_without_computed_tokens_reads_no_state() -> None:
    runner = started()
    go(runner, 1, 1, 2, release=[0], admit=[admit(1, [8, 9], (2,), (4, 5))], chunks=[Chunk(1, 2)])


def test_a_state_that_ran_ahead_is_caught() -> None:
    runner = started()
    go(runner, 1, 1, 1)
    copies = copied((1, 2), (4, 6), (5, 7))
    message = (
        rf"{ROW_1} \(block 6\): it has 6 tokens, the page holds a state after 7 tokens, of row 0"
    )
    with pytest.raises(AssertionError, match=message):
        go(runner, 2, 2, 1, admit=[follower((6, 7))], copies=copies, chunks=[Chunk(0, 0)])


def test_a_stale_state_is_caught() -> None:
    runner = started()
    go(runner, 1, 1, 1)
    stale = [TableEdit(0, 1, REPLACE, 1, (7,))]
    go(
        runner,
        2,
        1,
        1,
        table_edits=[TableEdit(0, 0, APPEND, 2, (3,)), *stale],
        copies=copied((5, 7)),
    )
    back = [TableEdit(0, 1, REPLACE, 1, (5,))]
    message = r"page 1 \(block 5\): it has 8 tokens, the page holds a state after 7 tokens"
    with pytest.raises(AssertionError, match=message):
        go(runner, 3, 1, 1, table_edits=back)


def test_a_state_of_other_tokens_is_caught() -> None:
    runner = started()
    other = admit(1, [1, 2, 3, 9, 5, 6], (2, 3), (6, 7))
    go(runner, 1, 2, 6, admit=[other], chunks=[Chunk(0, 0), Chunk(1, 6)])
    taken = [TableEdit(0, 1, REPLACE, 0, (6, 7))]
    message = "row 0 goes on from a wrong state in group 1, page 0"
    with pytest.raises(AssertionError, match=message):
        go(runner, 2, 1, 1, release=[1], table_edits=taken)


def test_pages_in_another_order_or_without_a_state_are_caught() -> None:
    for copies in (
        copied((1, 2), (4, 7), (5, 6)),
        copied((1, 2), (5, 7)),
        copied((1, 2), (0, 6), (5, 7)),
    ):
        runner = started()
        with pytest.raises(AssertionError, match=ROW_1):
            go(runner, 1, 2, 1, admit=[follower((6, 7))], copies=copies, chunks=[Chunk(0, 0)])


def test_a_state_cannot_be_read_as_k_and_v() -> None:
    runner = started()
    thief = admit(1, [*TOKENS, 77], (0, 4), (6, 7), computed=6)
    with pytest.raises(AssertionError, match="block 4, which is shared"):
        go(runner, 1, 2, 1, admit=[thief], chunks=[Chunk(0, 0)])


def test_forks_share_a_state_until_they_write() -> None:
    runner = started()
    fork = RowFork(1, 0, PARAMS, 1, joins_step=True)
    go(runner, 1, 2, 1, forks=[fork])
    edits = [TableEdit(1, 0, REPLACE, 1, (2,)), TableEdit(1, 1, REPLACE, 0, (6, 7))]
    go(runner, 2, 2, 2, table_edits=edits, copies=copied((1, 2), (4, 6), (5, 7)))


def test_a_write_into_a_fork_s_state_is_refused() -> None:
    runner = started()
    go(runner, 1, 2, 1, forks=[RowFork(1, 0, PARAMS, 1, joins_step=True)])
    edits = [TableEdit(1, 0, REPLACE, 1, (2,))]
    with pytest.raises(AssertionError, match=r"block 4, which is shared.*\(0, 1\), \(1, 1\)"):
        go(runner, 2, 2, 2, table_edits=edits, copies=copied((1, 2)))


def test_pages_of_a_step_in_flight_are_not_given_out() -> None:
    runner = started()
    launch(runner, plan(1, 1, 1))
    thief = admit(1, [8, 9], (2,), (6, 4))
    with pytest.raises(
        AssertionError, match="block 4 is given out, but step 1, which is in flight"
    ):
        launch(runner, plan(2, 1, 2, release=[0], admit=[thief], chunks=[Chunk(1, 2)]))


def test_a_failed_step_leaves_no_state() -> None:
    """It may have been carried out, or not; so it is with the copies that it was to make."""
    runner = started()
    launch(runner, plan(1, 1, 1))
    runner.reset()
    again = admit(0, [*TOKENS, 77], (0, 2), (4, 5), computed=6)
    with pytest.raises(AssertionError, match="the page holds no state"):
        go(runner, 2, 1, 1, admit=[again], copies=copied((1, 2)))


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (TableEdit(0, 1, APPEND, 2, (6,)), "append of a state"),
        (TableEdit(0, 1, CUT, 1), "truncate of a state"),
        (TableEdit(0, 1, HOLE, 0, (HOLE_BLOCK,)), "hole of a state"),
        (TableEdit(0, 1, REPLACE, 1, (6, 7)), "replace beyond a table of 2"),
        (TableEdit(0, 1, REPLACE, 1, (HOLE_BLOCK,)), "replaced by a hole"),
        (TableEdit(0, 0, HOLE, 0, (HOLE_BLOCK,)), "a hole in group 0, which is read whole"),
        (TableEdit(0, 0, APPEND, 2, (HOLE_BLOCK,)), "a hole is given to row 0 as a new block"),
    ],
)
def test_edits_that_a_kind_does_not_have_are_refused(edit: TableEdit, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        launch(started(), plan(1, 1, 1, table_edits=[edit]))


@pytest.mark.parametrize("pages", [(6,), (6, 7, 8), ()])
def test_a_state_has_its_number_of_pages_from_admission_on(pages: tuple[int, ...]) -> None:
    bad: StepPlan = plan(1, 2, 2, admit=[admit(1, [8, 9], (2,), pages)], chunks=[Chunk(1, 2)])
    with pytest.raises(AssertionError, match="a state takes 2 blocks, but its table has"):
        launch(started(), bad)


# ---- windows ------------------------------------------------------------------------------------


def windowed(size: int) -> FakeRunner:
    """Row 0 is live: 8 tokens computed, one sampled; in blocks 0 to 2, the window's in 4 to 6."""
    runner = make(FULL, window(size))
    admission = admit(0, list(range(1, 9)), (0, 1, 2), (4, 5, 6))
    go(runner, 0, 1, 8, admit=[admission], chunks=[Chunk(0, 8)])
    return runner


@pytest.mark.parametrize(("size", "is_read"), [(4, False), (5, False), (6, True), (9, True)])
def test_a_hole_is_read_from_the_window_that_reaches_it(size: int, is_read: bool) -> None:
    """The query at position 8 sees the keys from 8 - size + 1 on; the hole ends at 3."""
    runner = windowed(size)
    launch(runner, plan(1, 1, 1, table_edits=[TableEdit(0, 1, HOLE, 0, (HOLE_BLOCK,))]))
    if is_read:
        with pytest.raises(AssertionError, match=r"a wrong token [03] in group 1 \(block -1"):
            runner.result()
    else:
        assert runner.result().rows == [0]


def test_a_windows_table_may_be_shorter_than_the_full_ones_and_begin_with_holes() -> None:
    runner = windowed(5)
    hit = admit(1, [*range(1, 9), 70, 71], (0, 1, 3), (HOLE_BLOCK, 5, 7), computed=8)
    go(runner, 1, 2, 3, admit=[hit], chunks=[Chunk(1, 2)])
    late = admit(2, list(range(20, 32)), (8, 9, 10), (11,))
    launch(runner, plan(2, 3, 6, admit=[late], chunks=[Chunk(2, 4)]))
    assert sorted(runner.result().rows) == [0, 1]
    with pytest.raises(AssertionError, match="row 2 has no slot for its new tokens in group 1"):
        launch(runner, plan(3, 3, 6, chunks=[Chunk(2, 4)]))


def test_a_hit_whose_window_is_not_whole_is_caught() -> None:
    runner = windowed(6)
    hit = admit(1, [*range(1, 9), 70, 71], (0, 1, 3), (HOLE_BLOCK, 5, 7), computed=8)
    with pytest.raises(AssertionError, match="row 1 reads a wrong token 3 in group 1"):
        go(runner, 1, 2, 3, admit=[hit], chunks=[Chunk(1, 2)])


def test_only_blocks_that_a_window_has_passed_may_be_reused_at_once() -> None:
    for block, is_free in ((4, True), (5, False)):
        runner = windowed(4)
        launch(runner, plan(1, 1, 1))
        holes = [TableEdit(0, 1, HOLE, 0, (HOLE_BLOCK,) * (block - 3))]
        other = admit(1, [8, 9], (8,), (block,))
        taking = plan(2, 2, 2, admit=[other], table_edits=holes, chunks=[Chunk(0, 0), Chunk(1, 2)])
        if is_free:
            launch(runner, taking)
            assert runner.result().rows == [0] and runner.result().rows == [1]
            continue
        with pytest.raises(AssertionError, match="block 5 is given out, but step 1"):
            launch(runner, taking)
