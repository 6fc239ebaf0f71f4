"""Eviction orders: which of the free blocks with content goes first, and why."""

import random
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

from quire.core.memory.block_pool import BlockPool
from quire.core.memory.eviction import (
    EVICTION_ORDERS,
    HALF_LIFE,
    MAX_AGE,
    NUM_BINS,
    PRIOR,
    PRIOR_WEIGHT,
    SAMPLE_EVERY,
    LruOrder,
    ReuseCurve,
    bin_of,
)
from quire.errors import ConfigurationError


def key(number: int, group: int = 0) -> tuple[int, bytes]:
    return (group, number.to_bytes(16, "little"))


class Memory:
    """A pool and what is found in it, by numbers as contents."""

    def __init__(self, num_blocks: int, name: str = "hit_density") -> None:
        self.pool = BlockPool(num_blocks, EVICTION_ORDERS.get(name))
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
    assert EVICTION_ORDERS.get("lru") is LruOrder
    assert next(iter(EVICTION_ORDERS)) == "hit_density"
    with pytest.raises(ConfigurationError, match=r"order is 'fifo', .* one of hit_density, lru"):
        EVICTION_ORDERS.get("fifo")


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


def test_reused_content_outlives_content_used_once() -> None:
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
    pool = BlockPool(4 * SAMPLE_EVERY, EVICTION_ORDERS.get("hit_density"))
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


def test_the_memory_of_evicted_contents_is_bounded() -> None:
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


# ---- the reuse curve ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("age", "expected"),
    [(0, 0), (1, 1), (2, 2), (3, 2), (4, 3), (127, 7), (128, 8), (MAX_AGE, 8), (10**9, 8)],
)
def test_bins_are_octaves_and_the_last_is_open(age: int, expected: int) -> None:
    assert bin_of(age) == expected < NUM_BINS


def density(parts: list[float], first: int) -> float:
    """The best hits per epoch over bins first..last, from the definition: one content at a time."""
    best = 0.0
    for last in range(first, len(parts)):
        hits = epochs = 0.0
        left = 1.0
        for index in range(first, last + 1):
            width = max(1, 2 ** (index - 1))
            hits += left * parts[index]
            epochs += left * (parts[index] * width / 2 + (1 - parts[index]) * width)
            left *= 1 - parts[index]
        best = max(best, hits / epochs)
    return best


def expected_densities(reached: list[float], used: list[float], prior: float) -> list[float]:
    parts = [
        (hits + prior * PRIOR_WEIGHT) / (all_ + PRIOR_WEIGHT)
        for hits, all_ in zip(used, reached, strict=True)
    ]
    return [density(parts, first) for first in range(NUM_BINS)]


def test_before_anything_is_seen_younger_and_reused_contents_are_worth_more() -> None:
    once, again = ReuseCurve().densities()
    assert once == pytest.approx(expected_densities([0] * NUM_BINS, [0] * NUM_BINS, PRIOR[0]))
    assert again == pytest.approx(expected_densities([0] * NUM_BINS, [0] * NUM_BINS, PRIOR[1]))
    for values in (once, again):
        assert all(young >= old for young, old in pairwise(values))
        assert values[1] > 50 * values[-1]
    assert all(low < high for low, high in zip(once, again, strict=True))


def test_samples_are_counted_in_each_bin_that_they_reach_and_reuse_in_its_own() -> None:
    curve = ReuseCurve()
    for _ in range(10):
        curve.start(0)
    curve.record_reuse(0, 0)
    curve.next_epoch()  # nine reach bin 1, of an age of one epoch
    curve.start(0)
    for _ in range(3):
        curve.record_reuse(0, 0)
    curve.next_epoch()  # six and the one reach bins 2 and 1
    curve.next_epoch()  # the one reaches bin 2
    curve.record_reuse(0, 0)
    curve.record_reuse(0, 1)
    reached = [11.0, 10.0, 7.0, 0, 0, 0, 0, 0, 0]
    used = [1.0, 3.0, 2.0, 0, 0, 0, 0, 0, 0]
    assert curve.densities()[0] == pytest.approx(expected_densities(reached, used, PRIOR[0]))
    assert curve.densities()[1] == ReuseCurve().densities()[1]  # the other class saw nothing


def test_a_reuse_that_comes_late_makes_those_worth_more_that_have_waited() -> None:
    curve = ReuseCurve()
    for _ in range(400):
        curve.start(0)
        if curve.epoch >= 8:
            curve.record_reuse(0, curve.epoch - 8)  # always after eight epochs: bin 4
        curve.next_epoch()
    once, _ = curve.densities()
    assert once[0] < once[1] < once[2] < once[3] < once[4]
    assert once[5] < once[0] / 10


def test_observations_lose_half_their_weight_after_a_half_life() -> None:
    curve = ReuseCurve()
    for _ in range(64):
        curve.start(1)
        curve.record_reuse(1, 0)
    for _ in range(HALF_LIFE):
        curve.next_epoch()
    reached = [32.0] + [0.0] * (NUM_BINS - 1)
    expected = expected_densities(reached, reached, PRIOR[1])
    assert curve.densities()[1] == pytest.approx(expected)


def test_samples_of_every_age_up_to_the_greatest_can_be_reused() -> None:
    curve = ReuseCurve()
    curve.start(0)
    for _ in range(MAX_AGE):
        curve.next_epoch()
    before = curve.densities()[0][-1]
    curve.record_reuse(0, 0)
    assert curve.densities()[0][-1] > before
