"""Replays prefix accesses against a pool of blocks and counts the hits.

A hit is a block whose whole prefix is cached too. A request takes all its blocks, holds them while
it runs and then releases them, the tail of its chain first. What it computes is cached, hit or
not, until it is evicted. The blocks of its output are not in the traces and are left out.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

from benchmarks.eviction.traces import Access
from quire.core.memory.block_pool import BlockPool
from quire.core.memory.eviction import OrderFactory


class Cache(Protocol):
    """The owner of the blocks: the engine's own pool, or an algorithm of the study."""

    @property
    def num_free(self) -> int:
        """Blocks that no running request holds."""
        ...

    def __contains__(self, key: int) -> bool:
        """Whether this content is cached."""
        ...

    def hold(self, key: int) -> None:
        """One more running request uses a cached content."""
        ...

    def insert(self, keys: list[int]) -> None:
        """Compute contents that are not cached, and hold them. num_free is enough."""
        ...

    def release(self, key: int, depth: int) -> None:
        """A request that used the content, as its block number `depth`, has ended."""
        ...


CacheFactory = Callable[[int, list[Access]], Cache]
"""(number of blocks, all accesses: for those who foresee) -> cache."""


@dataclass(frozen=True, slots=True)
class HitRate:
    """The counts of a replay. num_skipped: requests longer than the whole pool."""

    num_blocks: int
    num_hits: int
    num_skipped: int

    @property
    def percent(self) -> float:
        """Hits among all blocks asked for."""
        return 100 * self.num_hits / max(1, self.num_blocks)


def replay(accesses: Iterable[Access], cache: Cache, pool_blocks: int) -> HitRate:
    """Run all accesses in order.

    Where too few blocks are free, a request waits for running ones, those that end first. In the
    end none runs.
    """
    running: deque[tuple[float, tuple[int, ...]]] = deque()
    num_blocks = num_hits = num_skipped = 0

    def end_first() -> None:
        _, ended = running.popleft()
        for depth in range(len(ended) - 1, -1, -1):
            cache.release(ended[depth], depth)

    for access in accesses:
        if len(access.block_ids) > pool_blocks:
            num_skipped += 1
            continue
        while running and running[0][0] <= access.arrival_s:
            end_first()
        while running and len(access.block_ids) > cache.num_free:
            end_first()
        num_blocks += len(access.block_ids)
        num_hits += _start(access, cache)
        running.append((access.arrival_s + access.hold_s, access.block_ids))
        if len(running) > 1 and running[-2][0] > running[-1][0]:
            running = deque(sorted(running))
    while running:
        end_first()
    return HitRate(num_blocks, num_hits, num_skipped)


def _start(access: Access, cache: Cache) -> int:
    """Give a request its blocks; returns how many of them are hits."""
    num_hits = 0
    while num_hits < len(access.block_ids) and access.block_ids[num_hits] in cache:
        num_hits += 1
    missing: list[int] = []
    for key in access.block_ids:  # after a gap, cached blocks are computed again, in their places
        if key in cache:
            cache.hold(key)
        else:
            missing.append(key)
    cache.insert(missing)
    return num_hits


class PoolCache:
    """The engine's block pool under one of its eviction orders."""

    def __init__(self, num_blocks: int, order: OrderFactory) -> None:
        self.pool = BlockPool(num_blocks, order)
        self._blocks: dict[int, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks that no running request holds."""
        return self.pool.num_free

    def __contains__(self, key: int) -> bool:
        return key in self._blocks

    def hold(self, key: int) -> None:
        """A prefix hit."""
        self.pool.share(self._blocks[key])

    def insert(self, keys: list[int]) -> None:
        """Take blocks, and publish them."""
        taken, evicted = self.pool.take(len(keys))
        for _, digest in evicted:
            del self._blocks[int.from_bytes(digest, "little")]
        for key, block in zip(keys, taken, strict=True):
            self.pool.set_content(block, (0, key.to_bytes(16, "little")))
            self._blocks[key] = block

    def release(self, key: int, depth: int) -> None:
        """The depth is not known to the pool."""
        self.pool.release(self._blocks[key])
