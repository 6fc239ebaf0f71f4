"""The pool against a plain model: a list of free blocks and a dict of counts."""

from collections.abc import Iterable
from typing import Any, SupportsIndex

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from quire.core.block_pool import BlockPool

NUM_BLOCKS = 6


def key(number: int) -> tuple[int, bytes]:
    return (0, bytes([number % 256, number // 256]))


def test_fresh_blocks_are_taken_in_order() -> None:
    pool = BlockPool(4)
    assert pool.take(3) == ([0, 1, 2], [])
    assert (pool.num_free, pool.num_held, pool.free_ids()) == (1, 3, [3])


def test_take_all_then_release_and_take_again() -> None:
    pool = BlockPool(3)
    pool.take(3)
    assert pool.free_ids() == []
    for block in (1, 0, 2):
        pool.release(block)
    assert pool.take(3) == ([2, 0, 1], [])  # without content: the last released goes first


def test_blocks_with_content_are_taken_after_those_without_oldest_first() -> None:
    pool = BlockPool(4)
    pool.take(4)
    pool.set_content(0, key(0))
    pool.set_content(1, key(1))
    for block in (1, 2, 0, 3):
        pool.release(block)
    assert pool.free_ids() == [3, 2, 1, 0]
    assert pool.take(3) == ([3, 2, 1], [key(1)])
    assert pool.content == [key(0), None, None, None]


def test_a_free_block_is_revived_with_its_content() -> None:
    pool = BlockPool(2)
    pool.take(1)
    pool.set_content(0, key(7))
    pool.release(0)
    pool.share(0)
    assert (pool.ref_count[0], pool.content[0], pool.free_ids()) == (1, key(7), [1])


def test_the_last_of_several_holders_frees_the_block() -> None:
    pool = BlockPool(1)
    pool.take(1)
    pool.share(0)
    pool.release(0)
    assert pool.num_free == 0
    pool.release(0)
    assert pool.num_free == 1


def test_forgotten_free_blocks_are_taken_first() -> None:
    pool = BlockPool(3)
    pool.take(3)
    for block in range(3):
        pool.set_content(block, key(block))
        pool.release(block)
    pool.forget(2)
    assert pool.free_ids() == [2, 0, 1]
    assert pool.take(1) == ([2], [])


def test_taking_nothing_changes_nothing() -> None:
    pool = BlockPool(2)
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
    assert pool.free_ids() == [0, 1]
    pool.take(1)
    pool.set_content(0, key(0))
    with pytest.raises(AssertionError):
        pool.set_content(0, key(1))  # it has content


@pytest.mark.parametrize("num_blocks", [0, -1])
def test_a_pool_without_blocks_is_refused(num_blocks: int) -> None:
    with pytest.raises(ValueError, match=f"num_blocks is {num_blocks}, .* at least 1"):
        BlockPool(num_blocks)


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


def counting_pool(num_blocks: int) -> BlockPool:
    pool = BlockPool(num_blocks)
    for name in ("ref_count", "content", "_next", "_previous"):
        setattr(pool, name, CountingList(getattr(pool, name)))
    return pool


def test_no_operation_costs_more_in_a_bigger_pool() -> None:
    script: Iterable[tuple[Any, ...]] = [
        ("take", 1),
        ("share", 0),
        ("set_content", 0, key(0)),
        ("release", 0),
        ("release", 0),
        ("share", 0),
        ("release", 0),
        ("forget", 0),
    ]
    small, large = counting_pool(4), counting_pool(50_000)
    for operation, *arguments in script:
        cost = count_accesses(small, operation, *arguments)
        assert cost == count_accesses(large, operation, *arguments) <= 12, operation
    cost_of_one = count_accesses(large, "take", 1)
    assert count_accesses(large, "take", 1000) <= 1000 * cost_of_one


class PoolMachine(RuleBasedStateMachine):
    """Random operations on the pool and on a model that is nothing but a list and two dicts."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.free = list(range(NUM_BLOCKS))
        self.counts: dict[int, int] = {}
        self.content: dict[int, tuple[int, bytes]] = {}
        self.num_keys = 0

    @rule(count=st.integers(0, NUM_BLOCKS))
    def take(self, count: int) -> None:
        if count > len(self.free):
            with pytest.raises(AssertionError):
                self.pool.take(count)
            return
        expected, self.free = self.free[:count], self.free[count:]
        evicted = [self.content.pop(block) for block in expected if block in self.content]
        assert self.pool.take(count) == (expected, evicted)
        self.counts.update(dict.fromkeys(expected, 1))

    @rule(block=st.integers(0, NUM_BLOCKS - 1))
    def share(self, block: int) -> None:
        self.pool.share(block)
        if block in self.free:
            self.free.remove(block)
        self.counts[block] = self.counts.get(block, 0) + 1

    @precondition(lambda self: self.counts)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.counts)))
        self.pool.release(block)
        self.counts[block] -= 1
        if self.counts[block]:
            return
        del self.counts[block]
        self.free.insert(len(self.free) if block in self.content else 0, block)

    @rule(block=st.integers(0, NUM_BLOCKS - 1))
    def set_content(self, block: int) -> None:
        if block in self.counts and block not in self.content:
            self.num_keys += 1
            self.content[block] = key(self.num_keys)
            self.pool.set_content(block, key(self.num_keys))

    @rule(block=st.integers(0, NUM_BLOCKS - 1))
    def forget(self, block: int) -> None:
        self.pool.forget(block)
        self.content.pop(block, None)
        if block in self.free:
            self.free.remove(block)
            self.free.insert(0, block)

    @invariant()
    def agrees(self) -> None:
        assert self.pool.free_ids() == self.free
        assert self.pool.num_free == len(self.free)
        assert self.pool.ref_count == [self.counts.get(block, 0) for block in range(NUM_BLOCKS)]
        assert self.pool.content == [self.content.get(block) for block in range(NUM_BLOCKS)]


PoolMachine.TestCase.settings = settings(
    max_examples=100, stateful_step_count=50, deadline=None, database=None
)
TestPoolMachine = PoolMachine.TestCase
