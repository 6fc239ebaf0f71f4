"""Eviction orders: which of the free blocks with content goes first, and why."""

import random
from collections.abc import Callable
from typing import Any

import pytest

from quire.core.memory.block_pool import BlockPool
from quire.core.memory.eviction import EVICTION_ORDERS, MAX_AGE, SAMPLE_EVERY, find_order
from quire.errors import ConfigurationError


def key(number: int, group: int = 0) -> tuple[int, bytes]:
    return (group, number.to_bytes(16, "little"))


class Memory:
    """A pool and what is found in it, by numbers as contents."""

    def __init__(self, num_blocks: int, name: str = "hit_density") -> None:
        self.pool = BlockPool(num_blocks, find_order(name))
        self.order: Any = self.pool._order
        self.blocks: dict[int, int] = {}
        self.fresh = iter(range(10**6, 10**9))

    def use(self, *contents: int) -> int:
        """A request for these contents, held together; returns how many were there."""
        found = [content for content in contents if content in self.blocks]
        for content in found:
            self.pool.share(self.blocks[content])
        missing = [content for content in contents if content not in self.blocks]
        taken, evicted = self.pool.take(len(missing))
        for _, digest in evicted:
            del self.blocks[int.from_bytes(digest, "little")]
        for content, block in zip(missing, taken, strict=True):
            self.pool.set_content(block, key(content))
            self.blocks[content] = block
        for content in reversed(contents):
            self.pool.release(self.blocks[content])
        return len(found)

    def scan(self, num_contents: int, at_once: int = 8) -> None:
        """Contents that are never used again."""
        for _ in range(0, num_contents, at_once):
            self.use(*(next(self.fresh) for _ in range(at_once)))


def test_orders_are_found_by_name() -> None:
    assert find_order("lru") is EVICTION_ORDERS["lru"]
    assert next(iter(EVICTION_ORDERS)) == "hit_density"
    with pytest.raises(ConfigurationError, match=r"eviction is 'fifo', .* one of hit_density, lru"):
        find_order("fifo")


@pytest.mark.parametrize("name", sorted(EVICTION_ORDERS))
def test_tails_of_a_chain_go_before_its_head(name: str) -> None:
    memory = Memory(6, name)
    memory.use(0, 1, 2)
    memory.use(10, 11, 12)
    memory.use(20, 21)
    assert list(memory.blocks) == [0, 10, 11, 12, 20, 21]


def test_lru_goes_by_the_last_release_alone() -> None:
    memory = Memory(4, "lru")
    for content in (0, 1, 2, 3, 0, 0, 0, 2):
        memory.use(content)
    memory.use(4)
    memory.use(5)
    assert sorted(memory.blocks) == [0, 2, 4, 5]
    memory.scan(4, at_once=1)
    assert not {0, 2} & set(memory.blocks)


def test_what_was_reused_outlives_what_was_not() -> None:
    memory = Memory(8)
    memory.use(0, 1, 2, 3)
    memory.use(0, 1)
    memory.use(4, 5, 6, 7)
    memory.scan(4, at_once=2)
    assert {0, 1} <= set(memory.blocks) and not {2, 3} & set(memory.blocks)


def test_a_content_computed_again_soon_after_its_eviction_counts_as_reused() -> None:
    memory = Memory(4)
    memory.use(0)
    memory.scan(4, at_once=1)
    assert 0 not in memory.blocks
    memory.use(0)
    memory.scan(40, at_once=1)
    assert 0 in memory.blocks


def test_groups_share_a_digest_without_disturbing_each_other() -> None:
    pool = BlockPool(4 * SAMPLE_EVERY, find_order("hit_density"))
    for _ in range(3):
        taken, evicted = pool.take(pool.num_blocks)
        assert len(set(evicted)) == len(evicted)
        for index, block in enumerate(sorted(taken)):
            digest, group = index % SAMPLE_EVERY, index // SAMPLE_EVERY
            pool.set_content(block, key(digest, group))
        for block in taken:
            pool.release(block)
            pool.share(block)
            pool.release(block)
    assert sorted(pool.free_ids()) == list(range(pool.num_blocks))


HOT = range(64)


def hit_rate(memory: Memory, draw: Callable[[int], list[int]], num_requests: int) -> float:
    """Over the second half of the requests."""
    hits = asked = 0
    for number in range(num_requests):
        contents = draw(number)
        found = memory.use(*contents)
        if number >= num_requests // 2:
            hits, asked = hits + found, asked + len(contents)
    return hits / asked


def test_a_scan_does_not_wash_out_the_hot_set() -> None:
    chance = random.Random(1)
    rates = {}
    for name in EVICTION_ORDERS:
        memory = Memory(128, name)

        def draw(number: int, memory: Memory = memory) -> list[int]:
            if number % 4:  # of 16 contents used, 12 are one-off ones
                return [next(memory.fresh) for _ in range(4)]
            return chance.sample(HOT, 4)

        rates[name] = hit_rate(memory, draw, 4000)
    # At best 0.25. LRU keeps of the hot ones what is used within 128 contents.
    assert rates["lru"] < 0.12
    assert rates["hit_density"] > 0.23


def test_where_reuse_comes_late_a_part_is_kept_until_then() -> None:
    rates = {}
    for name in EVICTION_ORDERS:
        memory = Memory(512, name)

        # Seven of eight are used again 700 requests later: more wait than there are blocks.
        def draw(number: int) -> list[int]:
            late = number - 700
            return [number, late] if late >= 0 and late % 8 else [number]

        rates[name] = hit_rate(memory, draw, 8000)
    assert rates["lru"] == 0.0
    assert rates["hit_density"] > 0.1


def test_an_order_that_learned_one_load_learns_the_next() -> None:
    memory = Memory(128)
    chance = random.Random(2)
    memory.scan(20_000)
    for start in (0, 1000):

        def draw(number: int, start: int = start) -> list[int]:
            if number % 4:
                return [next(memory.fresh) for _ in range(4)]
            return [start + content for content in chance.sample(HOT, 4)]

        assert hit_rate(memory, draw, 3000) > 0.22


def test_what_is_remembered_is_bounded() -> None:
    memory = Memory(2048)
    chance = random.Random(3)
    for number in range(18_000):
        memory.use(*range(8 * number, 8 * number + 8))
        if number % 3 == 0 and number > 150:
            first = 8 * (number - chance.randrange(150))
            memory.use(*range(first, first + 8))
    order = memory.order
    assert order._curve.epoch > 2 * MAX_AGE
    assert len(order._young_ghosts) + len(order._old_ghosts) <= 4.25 * 2048
    assert len(order._samples) <= 2.5 * 2048
    assert sum(map(len, order._closed)) <= 40
    assert len(order._queues.following) <= 2048 + 60
    widths = [[span.num_epochs for span in spans] for spans in order._closed]
    assert all(max(map(row.count, row)) <= 2 and row == sorted(row, reverse=True) for row in widths)
