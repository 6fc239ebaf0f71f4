"""The host tier: orders and how they end, with copies that end late and in any order."""

import math

import pytest
import torch
from tests.tiers.host.host_world import (
    BLOCK_BYTES,
    NUM_BLOCKS,
    HeldCopies,
    Orders,
    content_of,
    name_of,
    plain_copies,
)

from quire.core.memory.tiers.contract import Tail, Tiers
from quire.tiers.host import staged_copies
from quire.tiers.host.host_tier import HostTier


class HeldWorld(Orders):
    def __init__(self, num_slots: int) -> None:
        pool = torch.zeros((NUM_BLOCKS, BLOCK_BYTES), dtype=torch.uint8)
        self.copies = HeldCopies(plain_copies(pool, num_slots))
        self.tier = HostTier(self.copies)
        as_seam: Tiers = self.tier
        super().__init__(as_seam, pool)


def test_stored_blocks_are_loaded_again() -> None:
    world = HeldWorld(20)
    stored = world.store(range(10))
    assert world.results(stored) == [None] * 10
    assert not world.tier.find(0, name_of(3)), "its bytes are not there yet"
    world.copies.carry_out()
    assert world.results(stored) == [True] * 10
    loaded = world.load([*range(3, 9), 77])
    assert world.results(loaded) == [None] * 6 + [False]
    assert not world.has([3])
    world.copies.carry_out()
    assert world.results(loaded)[:6] == [True] * 6 and world.has(range(3, 9))
    counters = world.tier.counters()
    assert counters.loaded_bytes == 6 * BLOCK_BYTES and counters.stored_bytes == 10 * BLOCK_BYTES
    assert (counters.num_records, counters.used_bytes) == (10, 10 * BLOCK_BYTES)
    assert counters.pinned_bytes == 20 * BLOCK_BYTES
    assert (counters.loads_done, counters.loads_failed, counters.stores_done) == (6, 1, 10)


def test_batches_end_in_any_order() -> None:
    world = HeldWorld(20)
    first, second = world.store(range(4)), world.store(range(4, 8))
    world.copies.waiting.pop().carry_out()
    assert world.results(first) == [None] * 4 and world.results(second) == [True] * 4
    loaded = world.load([5]), world.load([6])
    world.copies.carry_out(backwards=True)
    assert world.results([*first, *loaded[0], *loaded[1]]) == [True] * 6
    assert world.has([5, 6])


def test_blocks_being_loaded_are_not_replaced() -> None:
    world = HeldWorld(4)
    world.store(range(4))
    world.copies.carry_out()
    world.take_in()
    loaded = world.load([0, 1])
    late = world.store([10, 11, 12])
    assert world.results(late) == [None, None, False], "two slots can be taken"
    world.copies.carry_out(backwards=True)
    assert world.results([*loaded, *late]) == [True, True, True, True, False]
    assert world.has([0, 1])
    assert [world.tier.find(0, name_of(number)) for number in (0, 1, 2, 10)] == [1, 1, 0, 1]
    assert world.tier.counters().evicted == 2


def test_a_full_host_takes_no_stores() -> None:
    world = HeldWorld(2)
    world.store([0, 1])
    assert not world.tier.takes_stores
    world.copies.carry_out()
    world.take_in()
    assert world.tier.takes_stores


def test_the_same_content_is_kept_once() -> None:
    world = HeldWorld(4)
    first, again = world.store([5]), world.store([5])
    assert world.results([*first, *again]) == [None, False]
    world.copies.carry_out()
    assert world.results(first) == [True]
    assert world.results(world.store([5])) == [True], "it is there"
    assert not world.copies.waiting


def test_cleared_contents_are_gone() -> None:
    world = HeldWorld(8)
    world.store([0, 1])
    world.copies.carry_out()
    world.take_in()
    loaded, stored = world.load([0]), world.store([2])
    world.tier.clear()
    world.copies.carry_out()
    assert world.results([*loaded, *stored]) == [True, False]
    assert world.has([0]), "what was under way still came"
    assert not any(world.tier.find(0, name_of(number)) for number in range(3))
    assert world.tier.table.num_takeable == world.tier.table.num_slots


def test_tails_are_found_by_what_comes_before() -> None:
    world = HeldWorld(8)
    world.store([1], parent=b"parent", tokens=b"abcd")
    assert not world.tier.tails(b"parent")
    world.copies.carry_out()
    world.take_in()
    assert world.tier.tails(b"parent") == [Tail(b"abcd", name_of(1))]


def test_predictions_are_learned_and_count_what_is_ahead() -> None:
    world = HeldWorld(16)
    world.store(range(16))
    world.copies.carry_out()
    world.take_in()
    contents = [(0, name_of(number)) for number in range(4)]
    guessed_s = world.tier.load_s(contents)
    assert world.tier.load_s([(0, b"unknown")]) == math.inf
    loaded = world.load(range(16))
    assert world.tier.load_s(contents) > guessed_s
    world.copies.carry_out()  # a millisecond for a kilobyte
    assert all(world.results(loaded)) and world.tier.load_s(contents) > guessed_s
    world.tier.close()
    assert world.tier.load_s(contents) == math.inf and not world.tier.takes_stores
    assert world.copies.is_closed
    assert world.results([*world.store([20]), *world.load([1])]) == [False, False]


def test_a_wait_ends_with_the_time_or_with_a_move() -> None:
    world = HeldWorld(4)
    stored = world.store([0])
    world.tier.wait(1e-3)
    assert world.results(stored) == [None]
    world.copies.carry_out()
    world.tier.wait(60.0)
    assert world.results(stored) == [True]


@pytest.mark.parametrize("staged", [1, 3, 100])
def test_blocks_go_through_the_staging_area_in_pieces(
    staged: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staged_copies, "STAGING_BYTES", staged * BLOCK_BYTES)
    pool = torch.stack([content_of(number) for number in range(NUM_BLOCKS)])
    copies = plain_copies(pool, 16)
    blocks, slots = [9, 2, 30, 4, 17, 5, 8], [3, 12, 4, 0, 5, 11, 8]
    assert copies.store(blocks, slots).is_over()
    for block, slot in zip(blocks, slots, strict=True):
        assert copies.slots[slot].tolist() == content_of(block).tolist()
    untouched = set(range(16)) - set(slots)
    assert not any(copies.slots[slot].any() for slot in untouched)
    pool[:] = 0
    copies.load(slots, blocks[::-1])
    for block, slot in zip(blocks[::-1], slots, strict=True):
        assert pool[block].tolist() == copies.slots[slot].tolist()
    others = set(range(NUM_BLOCKS)) - set(blocks)
    assert not any(pool[block].any() for block in others)
    copies.warm_up()
    assert copies.slots[0].tolist() == pool[0].tolist()
    copies.close()
    copies.close()
