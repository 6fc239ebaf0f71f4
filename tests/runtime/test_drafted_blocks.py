"""Which tokens of blocks have a drafter's K and V, over all changes of rows and blocks."""

import numpy as np

from quire.core.sampling_params import DecodingParams
from quire.core.step import BlockCopy, EditKind, RowAdmission, StepPlan, TableEdit
from quire.runtime.block_tables import BlockTables
from quire.runtime.drafted_blocks import DraftedBlocks

SIZE = 8


class World:
    """Rows of two groups, of which the second one has the drafter's layers."""

    def __init__(self) -> None:
        self.tables = BlockTables(2, 4, 10, SIZE)
        self.num_computed = np.zeros(4, np.int64)
        self.blocks = DraftedBlocks(40, self.tables, self.num_computed, [1, 1])

    def change(self, **changes: tuple[object, ...]) -> None:
        plan = StepPlan(0, 1, 1, **changes)  # type: ignore[arg-type]
        for each in plan.admit:
            self.tables.set_row(each.row, each.block_tables)
            self.num_computed[each.row] = each.num_computed_tokens
        for edit in plan.table_edits:
            self.tables.edit(edit)
        self.blocks.change(plan)

    def admit(self, row: int, num_computed: int, table: tuple[int, ...], *more: BlockCopy) -> None:
        tables = (tuple(block + 20 for block in table), table)
        admission = RowAdmission(row, [1] * 70, 70, num_computed, tables, DecodingParams(8))
        self.change(admit=(admission,), copies=more)


def test_tokens_are_counted_in_the_blocks_of_the_row() -> None:
    world = World()
    world.admit(0, 0, (3, 1, 2))
    assert world.blocks.num_reached(0, 20) == 0
    world.blocks.count(0, 0, 11)
    assert world.blocks.num_reached(0, 20) == 11
    assert world.blocks.num_reached(0, 9) == 9
    world.blocks.count(0, 11, 20)
    assert world.blocks.num_reached(0, 20) == 20
    assert world.blocks.num_reached(0, 24) == 20


def test_a_later_row_finds_what_was_counted() -> None:
    world = World()
    world.admit(0, 0, (3, 1, 2))
    world.blocks.count(0, 0, 24)
    world.admit(1, 16, (3, 1, 5))
    assert world.blocks.num_reached(1, 24) == 16
    world.blocks.forget([1])
    assert world.blocks.num_reached(1, 24) == 8
    world.blocks.count(1, 8, 16)
    assert world.blocks.num_reached(0, 24) == 24


def test_a_block_that_is_given_to_another_row_counts_nothing() -> None:
    world = World()
    world.admit(0, 0, (3, 1))
    world.blocks.count(0, 0, 16)
    world.admit(1, 0, (4,))
    world.blocks.count(1, 0, 8)
    world.change(table_edits=(TableEdit(1, 1, EditKind.APPEND, 1, (3,)),))
    assert world.blocks.num_reached(1, 16) == 8
    world.admit(2, 0, (1, 4))
    assert world.blocks.num_reached(2, 16) == 0


def test_a_copy_counts_up_to_the_computed_tokens_of_its_row() -> None:
    """The source may have other tokens behind those that the rows have in common."""
    world = World()
    world.admit(0, 0, (3, 1))
    world.blocks.count(0, 0, 15)
    world.admit(1, 11, (3, 6), BlockCopy(1, 6))
    assert world.blocks.num_reached(1, 16) == 11
    world.num_computed[0] = 13
    edit = TableEdit(0, 1, EditKind.REPLACE, 1, (7,))
    world.change(table_edits=(edit,), copies=(BlockCopy(1, 7),))
    assert world.blocks.num_reached(0, 16) == 13
