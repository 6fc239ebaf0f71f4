"""Remembers for which tokens of each block a drafter has computed K and V.

A drafter computes only the rows for which drafts pay, so a block may have K and V of the model
alone. Blocks outlive rows, in the prefix cache: what is counted for a block is there for the next
row that has it. Used by drafters.
"""

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from quire.core.step import EditKind, StepPlan
from quire.runtime.block_tables import BlockTables


class DraftedBlocks:
    """Counts, for each block, the leading tokens that have the drafter's K and V.

    Invariant: a block's count is at most the number of its tokens for which the drafter has
    computed K and V since the block was last assigned. It may be lower, for example after a copy
    was made of a block that is being filled.
    """

    def __init__(self, num_blocks: int, tables: BlockTables, groups: Iterable[int]) -> None:
        """`groups` are the KV groups with the drafter's layers. They keep all blocks of a row."""
        self._counts: npt.NDArray[np.int32] = np.zeros(num_blocks, np.int32)
        self._tables = tables
        self._block_size = tables.block_size
        self._groups = sorted(set(groups))

    def change(self, plan: StepPlan) -> None:
        """Count nothing in the blocks that the plan assigns, and as much in copies as in their
        sources."""
        counts, size = self._counts, self._block_size
        num_token_groups = self._tables.num_token_groups
        for admission in plan.admit:
            whole, rest = divmod(admission.num_computed_tokens, size)
            for group, table in enumerate(admission.block_tables):
                first = whole if group < num_token_groups else 0
                new = list(table[first:])
                if rest and new and group < num_token_groups:
                    counts[new[0]] = min(int(counts[new[0]]), rest)
                    new = new[1:]
                counts[new] = 0
        for edit in plan.table_edits:
            if edit.kind in (EditKind.APPEND, EditKind.REPLACE):
                counts[list(edit.block_ids)] = 0
        for copy in plan.copies:
            counts[copy.target] = counts[copy.source]

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
