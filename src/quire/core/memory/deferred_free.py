"""References that outlive their table: blocks which a step in flight may still read or copy."""

from collections import Counter, deque
from typing import NamedTuple

from quire.core.memory.block_pool import BlockPool
from quire.core.step import BlockCopy


class _Hold(NamedTuple):
    """References of one step; targets: what the blocks are copied to, if they wait for that."""

    step_id: int
    blocks: list[int]
    targets: list[int]


class StepHolds:
    """Blocks held by steps; each entry is one reference in the pool.

    Invariant: num_blocks is the number of entries; `num_copied_from[block]` of them only wait for
    the block to be copied.
    """

    def __init__(self, pool: BlockPool) -> None:
        self.num_blocks = 0
        self.num_copied_from: Counter[int] = Counter()
        self._pool = pool
        self._held: deque[_Hold] = deque()

    def hold(self, step_id: int, blocks: list[int]) -> None:
        """Take over one reference to each block until step_id has ended."""
        self._held.append(_Hold(step_id, blocks, []))
        self.num_blocks += len(blocks)

    def hold_copied(self, step_id: int, copies: list[BlockCopy]) -> None:
        """Take over one reference to each source until step_id, which copies them, has ended."""
        sources = [copy.source for copy in copies]
        self._held.append(_Hold(step_id, sources, [copy.target for copy in copies]))
        self.num_blocks += len(sources)
        self.num_copied_from.update(sources)

    def is_incomplete(self, block: int) -> bool:
        """Whether the block waits for a copy to be made into it."""
        return any(block in hold.targets for hold in self._held)

    def end_step(self, step_id: int) -> None:
        """Release what steps up to step_id held."""
        if not self._held:
            return
        still: deque[_Hold] = deque()
        for hold in self._held:
            if hold.step_id > step_id:
                still.append(hold)
                continue
            self.num_blocks -= len(hold.blocks)
            for block in hold.blocks:
                self._pool.release(block)
                if hold.targets:
                    self._copied(block)
        self._held = still

    def blocks(self) -> list[int]:
        """One entry for each reference; for checks and the ledger."""
        return [block for hold in self._held for block in hold.blocks]

    def _copied(self, block: int) -> None:
        self.num_copied_from[block] -= 1
        if not self.num_copied_from[block]:
            del self.num_copied_from[block]
