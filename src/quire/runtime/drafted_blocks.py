"""Remembers for which tokens of each block a drafter has computed K and V.

A drafter computes only the rows for which drafts pay, so a block may have K and V of the model
alone. Blocks outlive rows, in the prefix cache: what is counted for a block is there for the next
row that has it. Used by drafters.
"""

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from quire.core.step import EditKind, StepPlan
from quire.runtime.block_tables import BlockTables, Int64


class DraftedBlocks:
    """Counts, for each block, the leading tokens that have the drafter's K and V.

    Invariant: the drafter has computed K and V for the counted tokens of a block. Each row with the
    block has the same tokens in it, up to its number of computed tokens. The count may be lower
    than it could be.
    """

    def __init__(
        self, num_blocks: int, tables: BlockTables, num_computed: Int64, groups: Iterable[int]
    ) -> None:
        """`groups` are the KV groups with the drafter's layers. They keep all blocks of a row.
        `num_computed` has the number of computed tokens of each row."""
        self._counts: npt.NDArray[np.int32] = np.zeros(num_blocks, np.int32)
        self._tables = tables
        self._block_size = tables.block_size
        self._num_computed = num_computed
        self._groups = sorted(set(groups))

    def change(self, plan: StepPlan) -> None:
        """Count nothing in the blocks that the plan assigns. A copy counts as much as its source,
        up to the computed tokens of the row that gets it: the source may have others after them."""
        counts, size = self._counts, self._block_size
        num_token_groups = self._tables.num_token_groups
        limits: list[tuple[int, int]] = []  # (block, the most tokens that may count)
        for admission in plan.admit:
            for group, table in enumerate(admission.block_tables):
                is_state = group >= num_token_groups
                num_computed = 0 if is_state else admission.num_computed_tokens
                limits += _limits(table, 0, num_computed, size)
        for edit in plan.table_edits:
            if edit.kind is EditKind.APPEND:
                counts[list(edit.block_ids)] = 0
            elif edit.kind is EditKind.REPLACE:
                num_computed = int(self._num_computed[edit.row])
                if edit.group >= num_token_groups:
                    num_computed = 0
                limits += _limits(edit.block_ids, edit.first_logical_block, num_computed, size)
        for copy in plan.copies:
            counts[copy.target] = counts[copy.source]
        for block, most in limits:
            counts[block] = min(int(counts[block]), most)

    def forget(self, blocks: Iterable[int]) -> None:
        """Count nothing in these blocks."""
        self._counts[list(blocks)] = 0

    def num_reached(self, row: int, num_tokens: int) -> int:
        """Number of leading tokens of a row, at most num_tokens, that have K and V."""
        size = self._block_size
        num_blocks = -(-num_tokens // size)
        reached = num_tokens
        for group in self._groups:
            counts = self._counts[self._tables.entries[group, row, :num_blocks]]
            partial = np.flatnonzero(counts < size)
            if len(partial):
                first = int(partial[0])
                reached = min(reached, first * size + int(counts[first]))
        return reached

    def count(self, row: int, first: int, end: int) -> None:
        """Count the tokens [first, end) of a row, which follow counted ones."""
        size = self._block_size
        if end <= first:
            return
        blocks = np.arange(first // size, -(-end // size))
        filled = np.minimum(end - blocks * size, size).astype(np.int32)
        for group in self._groups:
            of_group = self._tables.entries[group, row, blocks]
            self._counts[of_group] = np.maximum(self._counts[of_group], filled)


def _limits(
    table: Sequence[int], first_block: int, num_computed: int, size: int
) -> list[tuple[int, int]]:
    """The blocks of a table from first_block on that the computed tokens don't fill, each with the
    number of computed tokens in it."""
    first = max(0, num_computed // size - first_block)
    return [
        (block, max(0, num_computed - (first_block + index) * size))
        for index, block in enumerate(table[first:], first)
    ]
