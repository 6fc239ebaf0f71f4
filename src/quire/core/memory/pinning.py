"""Pinned blocks: their content is kept while anything else is left to take.

Knows ids, priorities and times as numbers; reads no clock. Called by `block_pool` alone.
"""

import heapq
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, eq=False)
class Pin:
    """priority: the smaller is given up first. until_s: when it ends, or None for never."""

    priority: int
    until_s: float | None


class Pins:
    """Which blocks are pinned, and those of them that are free, by priority.

    Invariant: a block in `_free[priority]` has a pin of that priority, and no entry of `_free` is
    empty. Everything is O(1), save a heap of the pins that end (O(log pins) each) and the sorting
    of the priorities in use, done only when nothing but pinned blocks is free.
    """

    def __init__(self) -> None:
        self.num_free = 0
        self.by_block: dict[int, Pin] = {}
        self._free: dict[int, dict[int, None]] = {}
        self._ends: list[tuple[float, int, int, Pin]] = []  # (until_s, number, block, pin)
        self._num_pinned = 0  # since the start: makes the heap's entries comparable

    def pin(self, block: int, priority: int, until_s: float | None) -> None:
        """Pin a block that is not pinned; if it is free, `add` it as well."""
        assert block not in self.by_block
        self.by_block[block] = pin = Pin(priority, until_s)
        if until_s is not None:
            self._num_pinned += 1
            heapq.heappush(self._ends, (until_s, self._num_pinned, block, pin))
            if len(self._ends) > 2 * len(self.by_block) + 16:  # mostly stale
                self._ends = [entry for entry in self._ends if self._holds(entry)]
                heapq.heapify(self._ends)

    def unpin(self, block: int) -> None:
        """End the pin of a block; if it is free, `remove` it before."""
        del self.by_block[block]

    def add(self, block: int) -> None:
        """A pinned block was freed."""
        self._free.setdefault(self.by_block[block].priority, {})[block] = None
        self.num_free += 1

    def remove(self, block: int) -> None:
        """A free pinned block is free no more, or about to be unpinned."""
        priority = self.by_block[block].priority
        del self._free[priority][block]
        if not self._free[priority]:
            del self._free[priority]
        self.num_free -= 1

    def ended(self, now_s: float) -> list[int]:
        """The pinned blocks whose time is over, each named once: the caller unpins them."""
        blocks: list[int] = []
        while self._ends and self._ends[0][0] <= now_s:
            entry = heapq.heappop(self._ends)
            if self._holds(entry):
                blocks.append(entry[2])
        return blocks

    def take(self, count: int) -> list[int]:
        """Unpin `count` free ones, lowest priority first, then as they were freed."""
        blocks = self.block_ids()[:count]
        for block in blocks:
            self.remove(block)
            self.unpin(block)
        return blocks

    def block_ids(self) -> list[int]:
        """All free ones in the order in which they would be taken."""
        return [block for priority in sorted(self._free) for block in self._free[priority]]

    def _holds(self, entry: tuple[float, int, int, Pin]) -> bool:
        _, _, block, pin = entry
        return self.by_block.get(block) is pin
