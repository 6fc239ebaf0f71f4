"""Each edit of a table, and the slots that tables lead to."""

import numpy as np
import pytest

from quire.core.step import HOLE_BLOCK, EditKind, TableEdit
from quire.runtime.block_tables import BlockTables

BLOCK_SIZE = 8


@pytest.fixture
def tables() -> BlockTables:
    """Two groups; row 1 has three blocks in one and two in the other."""
    made = BlockTables(num_groups=2, num_rows=3, max_blocks=5, block_size=BLOCK_SIZE)
    made.set_row(1, [(4, 5, 6), (7, 8)])
    return made


def table(tables: BlockTables, group: int, row: int) -> list[int]:
    return tables.entries[group, row, : tables.lengths[group, row]].tolist()


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        (TableEdit(1, 0, EditKind.APPEND, 3, (9, 10)), [4, 5, 6, 9, 10]),
        (TableEdit(1, 0, EditKind.REPLACE, 1, (9, 10)), [4, 9, 10]),
        (TableEdit(1, 0, EditKind.TRUNCATE, 1), [4]),
        (TableEdit(1, 0, EditKind.HOLE, 0, (HOLE_BLOCK,)), [HOLE_BLOCK, 5, 6]),
    ],
    ids=lambda value: value.kind.value if isinstance(value, TableEdit) else "",
)
def test_an_edit_changes_one_table(
    tables: BlockTables, edit: TableEdit, expected: list[int]
) -> None:
    tables.edit(edit)
    assert table(tables, 0, 1) == expected
    assert table(tables, 1, 1) == [7, 8]


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (TableEdit(1, 1, EditKind.APPEND, 3, (9,)), "does not append at 2"),
        (TableEdit(1, 1, EditKind.REPLACE, 1, (9, 10)), "goes beyond 2 blocks"),
    ],
)
def test_an_edit_that_does_not_fit_is_caught(
    tables: BlockTables, edit: TableEdit, message: str
) -> None:
    with pytest.raises(AssertionError, match=message):
        tables.edit(edit)


def test_a_fork_is_a_copy(tables: BlockTables) -> None:
    tables.set_row(2, [(1, 1, 1, 1), (1, 1, 1, 1)])
    tables.fork(2, 1)
    tables.edit(TableEdit(1, 0, EditKind.REPLACE, 0, (9,)))
    assert [table(tables, group, 2) for group in (0, 1)] == [[4, 5, 6], [7, 8]]


def test_slots_of_one_row_and_of_many(tables: BlockTables) -> None:
    tables.set_row(0, [(3,), (2,)])
    slots = [np.full(6, -1) for _ in range(2)]
    tables.fill_slots(slots, slice(1, 4), tables.base(np.array([1])), np.array([7, 8, 9]))
    assert [part.tolist() for part in slots] == [
        [-1, 4 * 8 + 7, 5 * 8, 5 * 8 + 1, -1, -1],
        [-1, 7 * 8 + 7, 8 * 8, 8 * 8 + 1, -1, -1],
    ]
    tables.fill_slots(slots, slice(2), tables.base(np.array([1, 0])), np.array([15, 2]))
    assert [part[:2].tolist() for part in slots] == [[5 * 8 + 7, 3 * 8 + 2], [8 * 8 + 7, 2 * 8 + 2]]


def test_views_are_of_the_same_memory(tables: BlockTables) -> None:
    tables.edit(TableEdit(1, 1, EditKind.APPEND, 2, (9,)))
    assert tables.views[1][1, :3].tolist() == [7, 8, 9]


@pytest.fixture
def hybrid() -> BlockTables:
    """One group of tokens and one of states of seven blocks: more than a row has of the others."""
    made = BlockTables(1, num_rows=3, max_blocks=5, block_size=BLOCK_SIZE, state_sizes=(7,))
    made.set_row(1, [(4, HOLE_BLOCK, 6), (20, 21, 22, 23, 24, 25, 26)])
    return made


def test_states_have_tables_but_no_slots(hybrid: BlockTables) -> None:
    assert table(hybrid, 1, 1) == [20, 21, 22, 23, 24, 25, 26]
    slots = [np.full(2, -1)]
    hybrid.fill_slots(slots, slice(2), hybrid.base(np.array([1])), np.array([16, 17]))
    assert slots[0].tolist() == [6 * 8, 6 * 8 + 1]


def test_a_row_holds_tokens_whatever_its_states_take(hybrid: BlockTables) -> None:
    assert hybrid.holds_tokens(1, 3 * BLOCK_SIZE) and not hybrid.holds_tokens(1, 3 * BLOCK_SIZE + 1)


def test_a_fork_has_the_states_until_they_are_replaced(hybrid: BlockTables) -> None:
    hybrid.fork(2, 1)
    assert hybrid.have_same_states(2, 1)
    hybrid.edit(TableEdit(2, 1, EditKind.REPLACE, 0, tuple(range(30, 37))))
    assert not hybrid.have_same_states(2, 1)
    assert table(hybrid, 1, 2) == list(range(30, 37)) and table(hybrid, 0, 2) == [4, -1, 6]
