"""The pool of physical KV blocks: reference counts, contents, pins, and deferred frees.

The pool handles block ids, counts and content keys, not sequences, tokens or bytes. Only
`kv_cache_manager` and the modules that it is made of use it. Every operation costs O(1) amortized
per block.
"""

import heapq
from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from quire.core.memory.eviction import ContentKey, HitDensityOrder, OrderFactory
from quire.core.step import BlockCopy


@dataclass(frozen=True, slots=True, eq=False)
class Pin:
    """A promise to keep a block's content as long as possible."""

    #: Blocks with a smaller priority are given up first.
    priority: int
    #: Engine time at which the pin ends; None for never.
    until_s: float | None


class Pins:
    """Pinned blocks, by priority; their content is kept while any unpinned block is free.

    Reads no clock: callers pass the time.

    Invariant: a block in `_free[priority]` has a pin of that priority, and no entry of `_free` is
    empty. All operations cost O(1), with two exceptions: a pin that ends is kept in a heap, O(log
    pins), and `take` sorts the priorities in use, but runs only when no other blocks are free.
    """

    def __init__(self) -> None:
        #: Number of pinned blocks that are free.
        self.num_free = 0
        self.by_block: dict[int, Pin] = {}
        #: Free pinned blocks in the order of their release, by priority.
        self._free: dict[int, dict[int, None]] = {}
        self._ends: list[tuple[float, int, int, Pin]] = []  # (until_s, number, block, pin)
        self._num_pinned = 0  # pins since the start; makes the heap's entries comparable

    def pin(self, block: int, priority: int, until_s: float | None) -> None:
        """Pin a block that is not pinned; if the block is free, the caller must also call `add`."""
        assert block not in self.by_block
        self.by_block[block] = pin = Pin(priority, until_s)
        if until_s is not None:
            self._num_pinned += 1
            heapq.heappush(self._ends, (until_s, self._num_pinned, block, pin))
            if len(self._ends) > 2 * len(self.by_block) + 16:  # mostly stale
                self._ends = [entry for entry in self._ends if self._is_current(entry)]
                heapq.heapify(self._ends)

    def unpin(self, block: int) -> None:
        """End the pin of a block; if the block is free, the caller must have called `remove`."""
        del self.by_block[block]

    def add(self, block: int) -> None:
        """Add a pinned block that was just freed."""
        self._free.setdefault(self.by_block[block].priority, {})[block] = None
        self.num_free += 1

    def remove(self, block: int) -> None:
        """Remove a pinned block that is no longer free or is about to be unpinned."""
        priority = self.by_block[block].priority
        del self._free[priority][block]
        if not self._free[priority]:
            del self._free[priority]
        self.num_free -= 1

    def ended(self, now_s: float) -> list[int]:
        """Blocks whose pins have ended, each returned once; the caller unpins them."""
        blocks: list[int] = []
        while self._ends and self._ends[0][0] <= now_s:
            entry = heapq.heappop(self._ends)
            if self._is_current(entry):
                blocks.append(entry[2])
        return blocks

    def take(self, count: int) -> list[int]:
        """Take and unpin `count` free blocks, the lowest priority first, then in the order of
        release."""
        blocks = self.block_ids()[:count]
        for block in blocks:
            self.remove(block)
            self.unpin(block)
        return blocks

    def block_ids(self) -> list[int]:
        """All free pinned blocks in the order in which they would be taken."""
        return [block for priority in sorted(self._free) for block in self._free[priority]]

    def _is_current(self, entry: tuple[float, int, int, Pin]) -> bool:
        _, _, block, pin = entry
        return self.by_block.get(block) is pin


__all__ = ["BlockPool", "ContentKey"]


class BlockPool:
    """Reference counts over `num_blocks` block ids, and the free blocks in the order of their
    reuse.

    Invariant: a block is either held (ref_count >= 1) or free (ref_count == 0), and a free block is
    in exactly one of the four places below, from which blocks are taken left to right. A free block
    keeps its content key until it is taken, so this order *is* the cache's eviction order:

            [ without content    ] [ demoted             ] [ order         ] [ pinned      ]
              last released first    first released first    by its policy     by priority
    """

    def __init__(self, num_blocks: int, order: OrderFactory = HitDensityOrder) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks is {num_blocks}, but a pool needs at least 1")
        self.num_blocks = num_blocks
        self.num_free = num_blocks
        #: Number of times that a block has lost its last holder since the start.
        self.num_freed = 0
        #: Number of contents that were evicted since the start.
        self.num_evicted = 0
        #: Engine time, set by the caller and compared with the ends of pins.
        self.now_s = 0.0
        #: Log of blocks that got a content key; None unless a caller collects them.
        self.new_contents: list[int] | None = None
        #: Number of holders, by block.
        self.ref_count = [0] * num_blocks
        #: Content key, by block; None without one.
        self.content: list[ContentKey | None] = [None] * num_blocks
        #: Number of uses of the content since it was computed, by block; meaningless
        #: without content.
        self.num_uses = [0] * num_blocks
        # Free blocks without content, ordered by release; a dict allows removal from the middle.
        self._blank: dict[int, None] = dict.fromkeys(range(num_blocks - 1, -1, -1))
        #: Blocks whose content is evicted first once they are free.
        self.demoted: set[int] = set()
        # The demoted blocks that are free, ordered by release.
        self._passed: OrderedDict[int, None] = OrderedDict()
        self._order = order(num_blocks, self.content, self.num_uses)
        self._pins = Pins()
        self._pinned = self._pins.by_block

    @property
    def num_held(self) -> int:
        """Number of blocks with at least one holder."""
        return self.num_blocks - self.num_free

    @property
    def num_free_pinned(self) -> int:
        """Number of free blocks whose contents are pinned."""
        return self._pins.num_free

    def take(self, count: int) -> tuple[list[int], list[ContentKey]]:
        """Hold the first `count` free blocks in eviction order; returns their ids and the content
        keys that they lose.

        The caller has checked that num_free is large enough.
        """
        assert count <= self.num_free, f"took {count} blocks of {self.num_free} free ones"
        if self._pinned:
            self._end_pins()
        blank = self._blank
        if count == 1 and blank:  # the usual call, for a decoding sequence
            block = blank.popitem()[0]
            self.num_free -= 1
            self.ref_count[block] = 1
            return [block], []
        evicted: list[ContentKey] = []
        if len(blank) >= count:
            taken = [blank.popitem()[0] for _ in range(count)]
        elif blank or self._passed or self._pins.num_free:
            taken = self._take_mixed(count, evicted)
        else:
            taken = self._order.take(count, evicted)
        self.num_free -= count
        self.num_evicted += len(evicted)
        ref_count = self.ref_count
        for block in taken:
            ref_count[block] = 1
        return taken, evicted

    def share(self, block: int, *, is_use: bool = True) -> None:
        """Add a holder to a block; a free block leaves the free list with its content.

        is_use: whether this counts as a use of the content (True for a prefix hit, False for a
        fork).
        """
        count = self.ref_count[block]
        if count == 0:
            self._unlink_free(block, is_use)
            self.num_free -= 1
        self.ref_count[block] = count + 1
        if is_use:
            self.num_uses[block] += 1
            if self.demoted:
                self.demoted.discard(block)

    def release(self, block: int) -> None:
        """Remove a holder. A block without holders is free; blocks with content are reused after
        blocks without."""
        count = self.ref_count[block]
        assert count > 0, f"block {block} was released more often than it was held"
        self.ref_count[block] = count - 1
        if count == 1:
            self.num_freed += 1
            self.num_free += 1
            if self.content[block] is None:
                self._blank[block] = None
            elif block in self._pinned:
                self._pins.add(block)
            elif block in self.demoted:
                self._passed[block] = None
            else:
                self._order.add((block,))

    def release_all(self, blocks: Iterable[int]) -> None:
        """Call `release` for each block, in this order."""
        ref_count, content, pinned = self.ref_count, self.content, self._pinned
        blank, demoted = self._blank, self.demoted
        ordered: list[int] = []
        num_freed = 0
        for block in blocks:
            count = ref_count[block] - 1
            assert count >= 0, f"block {block} was released more often than it was held"
            ref_count[block] = count
            if count == 0:
                num_freed += 1
                if content[block] is None:
                    blank[block] = None
                elif block in pinned:
                    self._pins.add(block)
                elif block in demoted:
                    self._passed[block] = None
                else:
                    ordered.append(block)
        if ordered:
            self._order.add(ordered)
        self.num_freed += num_freed
        self.num_free += num_freed

    def demote(self, block: int) -> None:
        """Once the block is free, evict its content before all contents that are not demoted.

        Used for contents at an earlier position of a session that has continued: only a sequence
        that branches off there could use them, and such a hit ends the demotion.
        """
        if self.content[block] is None or block in self._pinned or block in self.demoted:
            return
        if not self.ref_count[block]:
            self._order.drop(block)
            self._passed[block] = None
        self.demoted.add(block)

    def set_contents(
        self,
        group: int,
        found: Sequence[tuple[int, bytes]],
        is_reused: bool = False,
        *,
        is_run: bool = True,
    ) -> None:
        """Call `set_content` for (block, digest) pairs of one KV group.

        is_reused: whether the contents count as used once, because the prefix that they extend was
        reused. is_run: whether the contents follow each other in one prompt.
        """
        content, num_uses, ref_count = self.content, self.num_uses, self.ref_count
        recall = self._order.recall
        if is_run:
            recalled = recall([digest for _, digest in found])
        else:
            recalled = [recall((digest,))[0] for _, digest in found]
        for (block, digest), is_recalled in zip(found, recalled, strict=True):
            assert ref_count[block] and content[block] is None
            content[block] = group, digest
            num_uses[block] = is_recalled or is_reused
        if self.new_contents is not None:
            self.new_contents += [block for block, _ in found]

    def set_content(self, block: int, key: ContentKey) -> None:
        """Give a held block its content key; the caller has checked that no other block has it."""
        assert self.ref_count[block] > 0 and self.content[block] is None
        self.content[block] = key
        self.num_uses[block] = self._order.recall((key[1],))[0]

    def forget(self, block: int) -> None:
        """Drop a block's content key and its pin; if the block is free, it is then among the first
        to be taken."""
        if self.content[block] is None:
            return
        if self.ref_count[block] == 0:
            self._unlink_free(block, False)
            self._blank[block] = None
        if block in self._pinned:
            self._pins.unpin(block)
        self.demoted.discard(block)
        self.content[block] = None
        self.num_uses[block] = 0

    def heat(self, block: int) -> int:
        """Number of uses of a block's content since it was computed; 0 without content.

        A content that was recently evicted and is computed again starts with 1.
        """
        return int(self.num_uses[block]) if self.content[block] is not None else 0

    def pin(self, block: int, priority: int = 0, until_s: float | None = None) -> None:
        """Keep a block's content: while free, the block is taken only when no unpinned block is
        left.

        Blocks with a lower priority go first. until_s: when the pin ends, compared with `now_s`;
        None for never. The pin also ends when the block is taken or forgotten. A new pin replaces
        an old one.
        """
        assert self.content[block] is not None, f"block {block} has no content to pin"
        is_free = self.ref_count[block] == 0
        if is_free:
            self._unlink_free(block, False)
        if block in self._pinned:
            self._pins.unpin(block)
        self.demoted.discard(block)
        self._pins.pin(block, priority, until_s)
        if is_free:
            self._pins.add(block)

    def unpin(self, block: int) -> None:
        """End a block's pin, if it has one; a free block then counts as just released."""
        if block not in self._pinned:
            return
        is_free = self.ref_count[block] == 0
        if is_free:
            self._pins.remove(block)
        self._pins.unpin(block)
        if is_free:
            self._order.add((block,))

    def is_pinned(self, block: int) -> bool:
        """Whether the block has a pin, as of `now_s`."""
        self._end_pins()
        return block in self._pinned

    def free_ids(self) -> list[int]:
        """All free blocks in the order in which they would be taken. O(free); for checks."""
        return [
            *reversed(self._blank),
            *self._passed,
            *self._order.block_ids(),
            *self._pins.block_ids(),
        ]

    def _take_mixed(self, count: int, evicted: list[ContentKey]) -> list[int]:
        """Take blocks from the four places in the order of eviction."""
        num_blank, num_passed = len(self._blank), len(self._passed)
        num_ordered = self.num_free - num_blank - num_passed - self._pins.num_free
        taken = [*reversed(self._blank)]
        self._blank.clear()
        num_passed = min(num_passed, count - len(taken))
        passed = [self._passed.popitem(last=False)[0] for _ in range(num_passed)]
        self.demoted.difference_update(passed)
        self._empty(passed, evicted)
        taken += passed
        if num_ordered and len(taken) < count:
            taken += self._order.take(min(count - len(taken), num_ordered), evicted)
        pinned = self._pins.take(count - len(taken))
        self._empty(pinned, evicted)
        return taken + pinned

    def _empty(self, blocks: list[int], evicted: list[ContentKey]) -> None:
        for block in blocks:
            key = self.content[block]
            assert key is not None
            evicted.append(key)
            self.content[block] = None

    def _unlink_free(self, block: int, is_use: bool) -> None:
        """Remove a free block from the list that it is in; it keeps its content and its pin."""
        if self.content[block] is None:
            del self._blank[block]
        elif block in self._pinned:
            self._pins.remove(block)
        elif block in self._passed:
            del self._passed[block]
        elif is_use:
            self._order.revive(block)
        else:
            self._order.drop(block)

    def _end_pins(self) -> None:
        for block in self._pins.ended(self.now_s):
            self.unpin(block)


class _Hold(NamedTuple):
    """References to blocks that are held until one step has ended."""

    step_id: int
    blocks: list[int]
    #: Targets of the copies if the held blocks are sources of copies; else empty.
    targets: list[int]


class DeferredFrees:
    """References dropped by tables but kept until the last step that may read or copy the block has
    ended.

    Invariant: num_blocks is the number of references; `num_copied_from[block]` counts those held
    only until the block has been copied.
    """

    def __init__(self, pool: BlockPool) -> None:
        self.num_blocks = 0
        self.num_copied_from: Counter[int] = Counter()
        self._pool = pool
        self._held: deque[_Hold] = deque()
        self._last_ended_step_id = -1

    def is_in_flight(self, step_id: int) -> bool:
        """Whether a step has not ended, so that it may still read its sequences' blocks."""
        return step_id > self._last_ended_step_id

    def hold(self, step_id: int, blocks: list[int]) -> None:
        """Take over one reference to each block until step_id has ended."""
        self._held.append(_Hold(step_id, blocks, []))
        self.num_blocks += len(blocks)

    def hold_copied(self, step_id: int, copies: list[BlockCopy]) -> None:
        """Take over one reference to each source until step_id, which copies it, has ended."""
        sources = [copy.source for copy in copies]
        self._held.append(_Hold(step_id, sources, [copy.target for copy in copies]))
        self.num_blocks += len(sources)
        self.num_copied_from.update(sources)

    def is_incomplete(self, block: int) -> bool:
        """Whether a copy into the block is not done yet."""
        return any(block in hold.targets for hold in self._held)

    def end_step(self, step_id: int, *, has_failed: bool = False) -> None:
        """Release the references of steps up to step_id.

        has_failed: release all references, also those to sources of the next step's copies, because
        that step's plan is dropped.
        """
        self._last_ended_step_id = step_id
        if not self._held:
            return
        still: deque[_Hold] = deque()
        for hold in self._held:
            if hold.step_id > step_id and not has_failed:
                still.append(hold)
                continue
            self.num_blocks -= len(hold.blocks)
            for block in hold.blocks:
                self._pool.release(block)
                if hold.targets:
                    self._copied(block)
        self._held = still

    def blocks(self) -> list[int]:
        """The held blocks, with one entry for each reference; for checks and reports."""
        return [block for hold in self._held for block in hold.blocks]

    def _copied(self, block: int) -> None:
        self.num_copied_from[block] -= 1
        if not self.num_copied_from[block]:
            del self.num_copied_from[block]
