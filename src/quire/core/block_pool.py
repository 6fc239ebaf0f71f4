"""Physical KV blocks: who holds them, what they contain, and in which order they are reused.

Knows ids, counts and content keys; nothing of sequences, tokens or bytes. Used by
`kv_cache_manager` alone. Every operation costs O(1) per block.
"""

ContentKey = tuple[int, bytes]
"""(KV group, content hash) of a full block."""


class BlockPool:
    """Reference counts and an intrusive free list over `num_blocks` block ids.

    Invariant: a block is either held (ref_count >= 1, not linked) or free (ref_count == 0, linked
    exactly once). A free block keeps its content key until it is taken again, so the free list
    *is* the cache's eviction order:

        head [ never used, or without content ] [ least recently released ... last released ] tail
               taken first                                                      taken last
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks is {num_blocks}, but a pool needs at least 1")
        self.num_blocks = num_blocks
        self.num_free = num_blocks
        self.num_freed = 0  # since the start: how often a block lost its last holder
        self.ref_count = [0] * num_blocks
        self.content: list[ContentKey | None] = [None] * num_blocks
        # A ring through all free blocks and one sentinel, whose id is num_blocks.
        self._sentinel = num_blocks
        self._next = [*range(1, num_blocks + 1), 0]
        self._previous = [num_blocks, *range(num_blocks)]

    @property
    def num_held(self) -> int:
        """Blocks with at least one holder."""
        return self.num_blocks - self.num_free

    def take(self, count: int) -> tuple[list[int], list[ContentKey]]:
        """Hold `count` free blocks, coldest first; returns their ids and the content they lose.

        The caller checks num_free first, so that nothing is changed where not all can be had.
        """
        assert count <= self.num_free, f"took {count} blocks of {self.num_free} free ones"
        taken: list[int] = []
        evicted: list[ContentKey] = []
        sentinel, following, content, ref_count = (
            self._sentinel,
            self._next,
            self.content,
            self.ref_count,
        )
        block = following[sentinel]
        for _ in range(count):
            taken.append(block)
            ref_count[block] = 1
            key = content[block]
            if key is not None:
                evicted.append(key)
                content[block] = None
            block = following[block]
        following[sentinel] = block
        self._previous[block] = sentinel
        self.num_free -= count
        return taken, evicted

    def share(self, block: int) -> None:
        """Add a holder; a free block is thereby revived with its content."""
        if self.ref_count[block] == 0:
            self._unlink(block)
        self.ref_count[block] += 1

    def release(self, block: int) -> None:
        """Remove a holder; the last one frees the block, for reuse late if it has content."""
        count = self.ref_count[block]
        assert count > 0, f"block {block} was released more often than it was held"
        self.ref_count[block] = count - 1
        if count == 1:
            self.num_freed += 1
            self._link(block, last=self.content[block] is not None)

    def set_content(self, block: int, key: ContentKey) -> None:
        """Say what a held block contains."""
        assert self.ref_count[block] > 0 and self.content[block] is None
        self.content[block] = key

    def forget(self, block: int) -> None:
        """Drop a block's content key; a free block moves to where it is taken first."""
        self.content[block] = None
        if self.ref_count[block] == 0:
            self._unlink(block)
            self._link(block, last=False)

    def free_ids(self) -> list[int]:
        """All free blocks in the order in which they would be taken. O(free); for checks."""
        ids: list[int] = []
        block = self._next[self._sentinel]
        while block != self._sentinel:
            ids.append(block)
            block = self._next[block]
        return ids

    def _unlink(self, block: int) -> None:
        before, after = self._previous[block], self._next[block]
        self._next[before] = after
        self._previous[after] = before
        self.num_free -= 1

    def _link(self, block: int, *, last: bool) -> None:
        before = self._previous[self._sentinel] if last else self._sentinel
        after = self._next[before]
        self._next[before] = block
        self._previous[block] = before
        self._next[block] = after
        self._previous[after] = block
        self.num_free += 1
