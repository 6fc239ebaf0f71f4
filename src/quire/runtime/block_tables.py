"""The block tables of all rows and KV groups, in one array.

A block table lists the blocks of memory that hold a row's data in one KV group. In a token group,
entry i is the block of tokens [i block_size, (i + 1) block_size), and each token has a slot, its
place in the memory. In a state group, the entries are the blocks of the row's one recurrent state,
and there are no slots. Token groups are numbered first. Part of `batch.RowBatch`.

Legend: R rows, G KV groups, M maximum number of blocks of a sequence in a group.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from quire.core.step import EditKind, TableEdit

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]


class BlockTables:
    """The block tables of all rows.

    Invariant: entries[group, row, :lengths[group, row]] is the row's table. Entries beyond it are
    undefined.
    """

    def __init__(
        self,
        num_groups: int,
        num_rows: int,
        max_blocks: int,
        block_size: int,
        state_sizes: Sequence[int] = (),
    ) -> None:
        """`num_groups` is the number of token groups, in each of which a row has at most
        `max_blocks` blocks. `block_size` is a power of two. `state_sizes` has the number of blocks
        of one state for each state group."""
        #: The number of token groups, whose tables come before those of state groups.
        self.num_token_groups = num_groups
        self.block_size = block_size
        num_groups += len(state_sizes)
        most = max(max_blocks, *state_sizes) if state_sizes else max_blocks
        #: [G, R, M]: the memory is never reallocated.
        self.entries: Int32 = np.zeros((num_groups, num_rows, most), np.int32)
        #: For each group, a tensor [R, M] that shares the memory of `entries`.
        self.views = list(torch.from_numpy(self.entries))
        #: [G, R]: the number of valid entries of each table.
        self.lengths: Int64 = np.zeros((num_groups, num_rows), np.int64)
        self._flat = [table.reshape(-1) for table in self.entries[: self.num_token_groups]]
        self._shift = block_size.bit_length() - 1
        self._mask = block_size - 1

    def set_row(self, row: int, tables: Sequence[Sequence[int]]) -> None:
        """Set the row's tables, one for each group."""
        for group, blocks in enumerate(tables):
            self.entries[group, row, : len(blocks)] = blocks
            self.lengths[group, row] = len(blocks)

    def fork(self, row: int, source: int) -> None:
        """Copy the tables of row `source` to `row`."""
        for table, length in zip(self.entries, self.lengths[:, source].tolist(), strict=True):
            table[row, :length] = table[source, :length]
        self.lengths[:, row] = self.lengths[:, source]

    def edit(self, edit: TableEdit) -> None:
        """Change one table by `edit.kind` (see `EditKind`): append or replace entries from
        `edit.first_logical_block` on, or cut the table there."""
        lengths = self.lengths[edit.group]
        first, last = edit.first_logical_block, edit.first_logical_block + len(edit.block_ids)
        if edit.kind is EditKind.TRUNCATE:
            lengths[edit.row] = first
            return
        if edit.kind is EditKind.APPEND:
            assert first == lengths[edit.row], f"{edit} does not append at {lengths[edit.row]}"
            lengths[edit.row] = last
        assert last <= lengths[edit.row], f"{edit} goes beyond {lengths[edit.row]} blocks"
        self.entries[edit.group, edit.row, first:last] = edit.block_ids

    def base(self, rows: Int64) -> Int64:
        """The index of each row's first entry in a group's flattened table, for `fill_slots`."""
        found: Int64 = rows * self.entries.shape[2]
        return found

    def holds_tokens(self, row: int, num_tokens: int) -> bool:
        """Whether the row's token tables have blocks for `num_tokens` tokens."""
        lengths = self.lengths[: self.num_token_groups, row]
        return bool((lengths << self._shift >= num_tokens).all())

    def have_same_states(self, row: int, other: int) -> bool:
        """Whether the state tables of two rows list the same blocks."""
        states = self.entries[self.num_token_groups :]
        lengths = self.lengths[self.num_token_groups :]
        return bool((lengths[:, row] == lengths[:, other]).all()) and all(
            (table[row, :length] == table[other, :length]).all()
            for table, length in zip(states, lengths[:, row].tolist(), strict=True)
        )

    def fill_slots(
        self, slots: Sequence[Int64], span: slice, base: Int64 | int, positions: Int64
    ) -> None:
        """Compute the slots of some tokens in each token group, and write those of group g to
        slots[g][span].

        A token's slot is its block's number times block_size, plus its offset in the block.
        `positions` are the tokens' positions in their sequences. `base` has the result of the
        method `base` for each token's row; it is one number if all tokens belong to one row.
        """
        places = base + (positions >> self._shift)
        offsets = positions & self._mask
        for target, table in zip(slots, self._flat, strict=True):
            blocks = table[places].astype(np.int64)
            target[span] = (blocks << self._shift) + offsets
