"""The pool against a plain model: a list of free blocks, a dict of counts, one of contents."""

from collections.abc import Iterable
from typing import Any, SupportsIndex

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from quire.core.memory.block_pool import BlockPool
from quire.core.memory.eviction import EVICTION_ORDERS

NUM_BLOCKS = 6

all_orders = pytest.mark.parametrize("name", sorted(EVICTION_ORDERS))


def key(number: int) -> tuple[int, bytes]:
    return (0, number.to_bytes(16, "little"))


def lru_pool(num_blocks: int) -> BlockPool:
    return BlockPool(num_blocks, EVICTION_ORDERS.get("lru"))


def full_pool(name: str, num_blocks: int) -> BlockPool:
    """All blocks free, block n with content n, released in the order of their ids."""
    pool = BlockPool(num_blocks, EVICTION_ORDERS.get(name))
    pool.take(num_blocks)
    for block in range(num_blocks):
        pool.set_content(block, key(block))
    for block in range(num_blocks):
        pool.release(block)
    return pool


@all_orders
def test_fresh_blocks_are_taken_in_order(name: str) -> None:
    pool = BlockPool(4, EVICTION_ORDERS.get(name))
    assert pool.take(3) == ([0, 1, 2], [])
    assert (pool.num_free, pool.num_held, pool.free_ids()) == (1, 3, [3])


@all_orders
def test_take_all_then_release_and_take_again(name: str) -> None:
    pool = BlockPool(3, EVICTION_ORDERS.get(name))
    pool.take(3)
    assert pool.free_ids() == []
    for block in (1, 0, 2):
        pool.release(block)
    assert pool.take(3) == ([2, 0, 1], [])  # without content: the last released goes first


@all_orders
def test_blocks_with_content_are_taken_after_those_without_oldest_first(name: str) -> None:
    pool = BlockPool(4, EVICTION_ORDERS.get(name))
    pool.take(4)
    pool.set_content(0, key(0))
    pool.set_content(1, key(1))
    for block in (1, 2, 0, 3):
        pool.release(block)
    assert pool.free_ids() == [3, 2, 1, 0]
    assert pool.take(3) == ([3, 2, 1], [key(1)])
    assert pool.content == [key(0), None, None, None]


@all_orders
def test_a_free_block_is_revived_with_its_content(name: str) -> None:
    pool = BlockPool(2, EVICTION_ORDERS.get(name))
    pool.take(1)
    pool.set_content(0, key(7))
    pool.release(0)
    pool.share(0)
    assert (pool.ref_count[0], pool.content[0], pool.free_ids()) == (1, key(7), [1])


@all_orders
def test_a_free_block_without_content_can_be_held_by_its_id(name: str) -> None:
    pool = BlockPool(3, EVICTION_ORDERS.get(name))
    pool.share(1)
    assert (pool.num_free, pool.free_ids()) == (2, [0, 2])
    pool.release(1)
    assert pool.free_ids() == [1, 0, 2]


def test_the_last_of_several_holders_frees_the_block() -> None:
    pool = BlockPool(1)
    pool.take(1)
    pool.share(0)
    pool.release(0)
    assert (pool.num_free, pool.num_freed) == (0, 0)
    pool.release(0)
    assert (pool.num_free, pool.num_freed) == (1, 1)


@all_orders
def test_forgotten_free_blocks_are_taken_first(name: str) -> None:
    pool = full_pool(name, 3)
    pool.forget(2)
    assert pool.free_ids() == [2, 0, 1]
    assert pool.take(1) == ([2], [])


def test_taking_nothing_changes_nothing() -> None:
    pool = BlockPool(2)
    assert pool.take(0) == ([], [])
    assert pool.free_ids() == [0, 1]
    pool = full_pool("hit_density", 2)
    assert pool.take(0) == ([], [])
    assert pool.free_ids() == [0, 1]


def test_misuse_raises_before_anything_changes() -> None:
    pool = BlockPool(2)
    with pytest.raises(AssertionError, match="took 3 blocks of 2 free"):
        pool.take(3)
    with pytest.raises(AssertionError, match="block 1 was released more often"):
        pool.release(1)
    with pytest.raises(AssertionError):
        pool.set_content(0, key(0))  # nobody holds it
    with pytest.raises(AssertionError, match="block 1 has no content to pin"):
        pool.pin(1)
    assert pool.free_ids() == [0, 1]
    pool.take(1)
    pool.set_content(0, key(0))
    with pytest.raises(AssertionError):
        pool.set_content(0, key(1))  # it has content


@pytest.mark.parametrize("num_blocks", [0, -1])
def test_a_pool_without_blocks_is_refused(num_blocks: int) -> None:
    with pytest.raises(ValueError, match=f"num_blocks is {num_blocks}, .* at least 1"):
        BlockPool(num_blocks)


# ---- heat -----------------------------------------------------------------------------------


def test_heat_counts_the_uses_of_a_content_but_not_forks_of_it() -> None:
    pool = BlockPool(2)
    pool.take(1)
    assert pool.heat(0) == 0
    pool.set_content(0, key(0))
    assert pool.heat(0) == 0
    pool.share(0)
    pool.share(0, is_use=False)
    assert pool.heat(0) == 1
    for _ in range(3):
        pool.release(0)
    pool.share(0)
    assert pool.heat(0) == 2
    pool.forget(0)
    assert pool.heat(0) == 0


def test_a_content_that_was_evicted_lately_comes_back_warm() -> None:
    pool = full_pool("hit_density", 4)
    pool.take(2)
    assert pool.heat(0) == 0
    pool.set_content(0, key(0))
    pool.set_content(1, key(99))
    assert (pool.heat(0), pool.heat(1)) == (1, 0)


# ---- pins -----------------------------------------------------------------------------------


@all_orders
def test_pinned_blocks_are_taken_last_and_the_lowest_priority_first(name: str) -> None:
    pool = full_pool(name, 5)
    pool.pin(0, priority=2)
    pool.pin(1, priority=1)
    pool.pin(3, priority=1)
    assert pool.free_ids() == [2, 4, 1, 3, 0]
    assert pool.take(4) == ([2, 4, 1, 3], [key(2), key(4), key(1), key(3)])
    assert pool.is_pinned(0) and not pool.is_pinned(1)  # a pin ends when its block is taken


def test_a_pin_outlives_being_held() -> None:
    pool = full_pool("hit_density", 2)
    pool.pin(0)
    pool.share(0)
    assert pool.free_ids() == [1]
    pool.release(0)
    assert pool.free_ids() == [1, 0] and pool.num_free == 2


def test_unpinned_free_blocks_go_behind_the_others() -> None:
    pool = full_pool("lru", 3)
    pool.pin(0)
    pool.unpin(0)
    pool.unpin(2)  # which has none
    assert pool.free_ids() == [1, 2, 0]
    assert pool.take(3)[0] == [1, 2, 0]


def test_a_pin_ends_with_its_time() -> None:
    pool = full_pool("lru", 3)
    pool.pin(0, until_s=5.0)
    pool.pin(1, until_s=9.0)
    pool.now_s = 4.9
    assert pool.is_pinned(0)
    pool.now_s = 5.0
    assert pool.take(2)[0] == [2, 0]
    assert pool.is_pinned(1) and not pool.is_pinned(0)


def test_a_later_pin_replaces_an_earlier_one_with_its_time_and_priority() -> None:
    pool = full_pool("lru", 3)
    pool.pin(0, priority=1, until_s=5.0)
    pool.pin(0, priority=3)
    pool.pin(1, priority=2)
    pool.now_s = 6.0
    assert pool.is_pinned(0)
    assert pool.take(3)[0] == [2, 1, 0]


def test_a_forgotten_block_loses_its_pin() -> None:
    pool = full_pool("hit_density", 2)
    pool.pin(1, until_s=1.0)
    pool.forget(1)
    assert pool.take(1) == ([1], [])
    pool.set_content(1, key(7))
    assert not pool.is_pinned(1)
    pool.now_s = 2.0
    assert pool.take(1) == ([0], [key(0)])


def test_renewed_pins_do_not_pile_up() -> None:
    pool = full_pool("lru", 2)
    for moment in range(1000):
        pool.pin(0, until_s=1e6 + moment)
    assert len(pool._pins._ends) <= 20
    pool.now_s = 1e6 + 998
    assert pool.is_pinned(0)
    pool.now_s = 1e6 + 999
    assert not pool.is_pinned(0)


# ---- cost -----------------------------------------------------------------------------------


class CountingList(list[Any]):
    """A list that counts how often its elements are read or written."""

    count = 0

    def __getitem__(self, index: SupportsIndex | slice) -> Any:
        CountingList.count += 1
        return super().__getitem__(index)

    def __setitem__(self, index: Any, value: Any) -> None:
        CountingList.count += 1
        super().__setitem__(index, value)

    def __iter__(self) -> Any:
        raise AssertionError("an operation ran over the whole pool")


def count_accesses(pool: BlockPool, operation: str, *arguments: Any) -> int:
    CountingList.count = 0
    getattr(pool, operation)(*arguments)
    return CountingList.count


def counting_pool(name: str, num_blocks: int) -> BlockPool:
    pool = BlockPool(num_blocks, EVICTION_ORDERS.get(name))
    order: Any = pool._order
    pool.ref_count = CountingList(pool.ref_count)
    pool.content = order._content = CountingList(pool.content)
    queues = order._queues
    queues.following, queues.previous = map(CountingList, (queues.following, queues.previous))
    if name == "hit_density":
        pool.num_uses = order._num_uses = CountingList(pool.num_uses)
        order._following, order._previous = queues.following, queues.previous
    return pool


@all_orders
def test_no_operation_costs_more_in_a_bigger_pool(name: str) -> None:
    script: Iterable[tuple[Any, ...]] = [
        ("take", 1),
        ("share", 0),
        ("set_content", 0, key(0)),
        ("release", 0),
        ("release", 0),
        ("share", 0),
        ("release", 0),
        ("pin", 0),
        ("unpin", 0),
        ("forget", 0),
    ]
    small, large = counting_pool(name, 4), counting_pool(name, 50_000)
    for operation, *arguments in script:
        cost = count_accesses(small, operation, *arguments)
        assert cost == count_accesses(large, operation, *arguments) <= 24, operation


@all_orders
def test_evicting_and_filling_a_block_costs_the_same_in_every_pool(name: str) -> None:
    costs = [_accesses_per_allocation(counting_pool(name, size)) for size in (512, 4096)]
    assert max(costs) <= 40
    assert costs[1] <= costs[0] * 1.05


def _accesses_per_allocation(pool: BlockPool) -> float:
    """Over five times as many evictions as there are blocks, with every third content reused."""
    num_keys, num_taken = 0, 0
    pool.take(pool.num_blocks)
    for block in range(pool.num_blocks):
        pool.set_content(block, key(num_keys := num_keys + 1))
        pool.release(block)
    CountingList.count = 0
    while num_taken < 5 * pool.num_blocks:
        taken, evicted = pool.take(8)
        assert len(evicted) == 8
        for block in taken:
            pool.set_content(block, key(num_keys := num_keys + 1))
        for block in reversed(taken):
            pool.release(block)
        for block in taken[:3]:
            pool.share(block)
        for block in reversed(taken[:3]):
            pool.release(block)
        num_taken += 8
    return CountingList.count / num_taken


# ---- anything at all ------------------------------------------------------------------------


class PoolMachine(RuleBasedStateMachine):
    """Random operations on the pool and on a model that is nothing but lists and dicts.

    The model knows LRU. Of another order it knows which blocks come before which: those without
    content, then the order's, whatever their sequence, then pinned ones; and that what is listed
    as free is what is taken.
    """

    name = "lru"

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS, EVICTION_ORDERS.get(self.name))
        self.blank = list(range(NUM_BLOCKS))
        self.ordered: list[int] = []
        self.pinned: list[int] = []
        self.pins: dict[int, tuple[int, float | None]] = {}
        self.counts: dict[int, int] = {}
        self.content: dict[int, tuple[int, bytes]] = {}
        self.num_keys = 0

    def expected_free(self) -> list[int]:
        by_priority = sorted(self.pinned, key=lambda block: self.pins[block][0])
        return [*self.blank, *self.ordered, *by_priority]

    def leave(self, block: int) -> None:
        for free in (self.blank, self.ordered, self.pinned):
            if block in free:
                free.remove(block)

    def enter(self, block: int) -> None:
        if block not in self.content:
            self.blank.insert(0, block)
        elif block in self.pins:
            self.pinned.append(block)
        else:
            self.ordered.append(block)

    def unpin_in_model(self, block: int) -> None:
        del self.pins[block]
        if block in self.pinned:
            self.pinned.remove(block)
            self.enter(block)

    @rule(count=st.integers(0, NUM_BLOCKS))
    def take(self, count: int) -> None:
        expected = self.pool.free_ids()[:count]
        if count > len(self.expected_free()):
            with pytest.raises(AssertionError):
                self.pool.take(count)
            return
        evicted = [self.content.pop(block) for block in expected if block in self.content]
        assert self.pool.take(count) == (expected, evicted)
        for block in expected:
            self.leave(block)
            self.pins.pop(block, None)
        self.counts.update(dict.fromkeys(expected, 1))

    @rule(block=st.integers(0, NUM_BLOCKS - 1), is_use=st.booleans())
    def share(self, block: int, is_use: bool) -> None:
        heat = self.pool.heat(block)
        self.pool.share(block, is_use=is_use)
        self.leave(block)
        self.counts[block] = self.counts.get(block, 0) + 1
        assert self.pool.heat(block) == heat + (is_use and block in self.content)

    @precondition(lambda self: self.counts)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.counts)))
        self.pool.release(block)
        self.counts[block] -= 1
        if not self.counts[block]:
            del self.counts[block]
            self.enter(block)

    @rule(block=st.integers(0, NUM_BLOCKS - 1), is_new=st.booleans())
    def set_content(self, block: int, is_new: bool) -> None:
        if block in self.counts and block not in self.content:
            self.num_keys += is_new
            chosen = key(self.num_keys if is_new else self.num_keys // 2)
            if chosen not in self.content.values():
                self.content[block] = chosen
                self.pool.set_content(block, chosen)

    @rule(block=st.integers(0, NUM_BLOCKS - 1))
    def forget(self, block: int) -> None:
        self.pool.forget(block)
        if self.content.pop(block, None) is not None:
            self.pins.pop(block, None)
            if block not in self.counts:
                self.leave(block)
                self.enter(block)

    @precondition(lambda self: self.content)
    @rule(data=st.data(), priority=st.integers(0, 2), lasts_s=st.sampled_from([None, 1, 3]))
    def pin(self, data: st.DataObject, priority: int, lasts_s: int | None) -> None:
        block = data.draw(st.sampled_from(sorted(self.content)))
        until_s = None if lasts_s is None else self.pool.now_s + lasts_s
        self.pool.pin(block, priority, until_s)
        self.pins.pop(block, None)  # a new pin is the youngest, also where it replaces one
        self.pins[block] = (priority, until_s)
        if block not in self.counts:
            self.leave(block)
            self.enter(block)

    @rule(block=st.integers(0, NUM_BLOCKS - 1))
    def unpin(self, block: int) -> None:
        self.pool.unpin(block)
        if block in self.pins:
            self.unpin_in_model(block)

    @rule()
    def a_second_passes(self) -> None:
        self.pool.now_s += 1
        ended = [(until_s, block) for block, (_, until_s) in self.pins.items() if until_s]
        for until_s, block in ended:
            if until_s <= self.pool.now_s:
                assert not self.pool.is_pinned(block)
                self.unpin_in_model(block)

    @invariant()
    def agrees(self) -> None:
        free, expected = self.pool.free_ids(), self.expected_free()
        if self.name != "lru":
            start, end = len(self.blank), len(self.blank) + len(self.ordered)
            free[start:end], expected[start:end] = sorted(free[start:end]), sorted(self.ordered)
        assert free == expected
        assert self.pool.num_free == len(free)
        assert self.pool.ref_count == [self.counts.get(block, 0) for block in range(NUM_BLOCKS)]
        assert self.pool.content == [self.content.get(block) for block in range(NUM_BLOCKS)]


class HitDensityMachine(PoolMachine):
    """The same over the default order, with epochs short enough to end often."""

    name = "hit_density"

    def __init__(self) -> None:
        super().__init__()
        order: Any = self.pool._order
        order._epoch_length = order._num_left_in_epoch = 2


PoolMachine.TestCase.settings = settings(
    max_examples=40, stateful_step_count=60, deadline=None, database=None
)
HitDensityMachine.TestCase.settings = settings(
    max_examples=40, stateful_step_count=100, deadline=None, database=None
)
TestPoolMachine = PoolMachine.TestCase
TestHitDensityMachine = HitDensityMachine.TestCase
