"""Copy on write: copies shared blocks before a sequence changes them.

Two kinds of blocks are copied: partly filled blocks that a fork also holds, and states that a fork
also holds or that are snapshots. `kv_cache_manager` uses this module; the scheduler uses it to
count the blocks that a write takes.
"""

from collections import Counter
from collections.abc import Callable, Iterable

from quire.core.memory.block_pool import BlockPool, DeferredFrees
from quire.core.memory.growth import Growth
from quire.core.sequence import Sequence
from quire.core.step import BlockCopy, EditKind, TableEdit

Taker = Callable[[int, Sequence], list[int]]
"""(count, sequence that needs the blocks) -> ids of blocks taken from the pool, each with one
reference."""


class CopyOnWrite:
    """Finds the table entries that must be copied before a sequence's next token, and copies them.

    A state with a content key is a snapshot: it is found by that key and never changed again.
    """

    def __init__(
        self, growth: Growth, pool: BlockPool, deferred: DeferredFrees, take: Taker
    ) -> None:
        self._growth = growth
        self._pool = pool
        self._deferred = deferred
        self._take = take

    def is_due(self, sequence: Sequence) -> bool:
        """Whether the next token changes a block that has other holders or is a snapshot."""
        if not sequence.shares_tail:
            return False
        sequence.shares_tail = any(True for _ in self._shared_entries(sequence))
        return sequence.shares_tail

    def num_blocks(self, sequences: Iterable[Sequence]) -> int:
        """Number of free blocks, for copies and for full tables, that are needed if each sequence
        computes one more token, and those that must be computed with it."""
        sequences, size, num_grown = list(sequences), self._growth.block_size, 0
        for sequence in sequences:
            tables, wanted = sequence.block_tables, sequence.next_cut
            if wanted > sequence.num_slots:
                end = -(-wanted // size)
                lengths = [len(tables[rule.group]) for rule in self._growth.growing]
                num_grown += sum([max(0, end - length) for length in lengths])
        return num_grown + self.num_copies(sequences)

    def num_copies(self, sequences: Iterable[Sequence]) -> int:
        """Number of block copies needed if each sequence computes one more token.

        If n sequences are the only holders of a block, n - 1 of them copy it.
        """
        shared: Counter[int] = Counter()
        for sequence in sequences:
            if sequence.shares_tail:
                shared.update(block for _, _, block in self._shared_entries(sequence))
        return sum(
            count - (self._num_holders(block) == count and not self._is_kept(block))
            for block, count in shared.items()
        )

    def copy(self, sequence: Sequence, step_id: int) -> tuple[list[TableEdit], list[BlockCopy]]:
        """Replace the shared blocks of a sequence by copies of its own.

        The caller has checked that enough blocks are free. The old blocks stay held until step_id,
        which copies them, has ended.
        """
        row = -1 if sequence.row is None else sequence.row
        edits: list[TableEdit] = []
        copies: list[BlockCopy] = []
        for group, index, source in list(self._shared_entries(sequence)):
            target = self._take(1, sequence)[0]
            sequence.block_tables[group][index] = target
            copies.append(BlockCopy(source, target))
            edits.append(TableEdit(row, group, EditKind.REPLACE, index, (target,)))
        self._deferred.hold_copied(step_id, copies)
        sequence.shares_tail = False
        return edits, copies

    def _shared_entries(self, sequence: Sequence) -> Iterable[tuple[int, int, int]]:
        """The table entries (group, index, block) whose blocks must not be changed in place."""
        tables = sequence.block_tables
        for rule in self._growth.rules:
            table = tables[rule.group]
            for index in rule.rewritten(sequence.num_computed_tokens):
                block = table[index]
                if self._num_holders(block) > 1 or self._is_kept(block):
                    yield rule.group, index, block

    def _num_holders(self, block: int) -> int:
        """Number of holders of a block, except references held only until it has been copied."""
        return self._pool.ref_count[block] - self._deferred.num_copied_from[block]

    def _is_kept(self, block: int) -> bool:
        """Whether the block is part of a snapshot."""
        content = self._pool.content[block]
        return content is not None and not self._growth.rules[content[0]].has_slots
