"""The disk tier on a virtual clock: times by its speeds, contents as the real store keeps them."""

import random
from dataclasses import replace
from pathlib import Path

import pytest
from tests.tiers.disk.store_world import NUM_BYTES, Opened, order_of, read, write

from quire.core.kv_groups import KVGroup, KVKind
from quire.core.memory.tiers.contract import LoadOrder, MoveEnd, StoreOrder
from quire.errors import ConfigurationError
from quire.simulation.virtual_disk import DiskShape, DiskSpeeds, KeptSegments, VirtualDisk
from quire.simulation.virtual_engine import VirtualClock
from quire.tiers.disk.load_rate import LoadSpeed
from quire.tiers.disk.record import Record, record_bytes

SIZE = 4096
RECORD = record_bytes(SIZE)
GROUPS = (KVGroup((0,), KVKind.FULL, SIZE),)
ALONE, BESIDE = LoadSpeed(0.5, 1 / RECORD), LoadSpeed(1.0, 2 / RECORD)
SHAPE = DiskShape(speeds=DiskSpeeds(ALONE, BESIDE, 3 / RECORD), num_bytes=16 << 20)


def made(shape: DiskShape = SHAPE) -> tuple[VirtualDisk, VirtualClock]:
    clock = VirtualClock()
    return VirtualDisk(shape, GROUPS, 100, clock, clock.wait_until), clock


def stores(*numbers: int) -> list[StoreOrder]:
    return [StoreOrder(number, number, 0, bytes([number])) for number in numbers]


def loads(*numbers: int) -> list[LoadOrder]:
    return [LoadOrder(100 + number, number, 0, bytes([number])) for number in numbers]


def filled(*numbers: int, shape: DiskShape = SHAPE) -> tuple[VirtualDisk, VirtualClock]:
    """A disk that has stored these contents, without a step under way."""
    disk, clock = made(shape)
    disk.start(stores(*numbers), ())
    while len(numbers):
        disk.wait(100.0)
        numbers = numbers[len(disk.ended()) :]
    disk.wait(0.0)
    return disk, clock


def test_stores_take_their_bytes_one_after_another() -> None:
    disk, clock = made()
    disk.start(stores(1, 2), ())
    assert disk.ended() == [] and not disk.find(0, bytes([1]))
    clock.wait_until(3.0)
    assert disk.ended() == [MoveEnd(1, True)] and disk.find(0, bytes([1]))
    clock.wait_until(6.0)
    assert disk.ended() == [MoveEnd(2, True)]
    disk.start(stores(2), ())
    disk.wait(100.0)
    assert disk.ended() == [MoveEnd(2, True)], "it is stored already"
    assert disk.counts()["disk"]["stored_bytes"] == 2 * SIZE


def test_loads_have_one_latency_and_their_bytes() -> None:
    disk, clock = filled(1, 2)
    began_s = clock()
    assert disk.load_s([(0, bytes([1])), (0, bytes([2]))]) == 2.5
    disk.start((), loads(1, 2, 3))
    assert disk.load_s([(0, bytes([1]))]) == 4.5, "three are ahead"
    ends: list[MoveEnd] = []
    while len(ends) < 3:
        disk.wait(100.0)
        ends += disk.ended()
    assert ends == [MoveEnd(101, True), MoveEnd(102, True), MoveEnd(103, False)]
    assert clock() - began_s == 3.5


def test_loads_beside_steps_have_the_speed_for_that() -> None:
    disk, clock = filled(1)
    disk.start((), loads(1))
    assert disk.ended() == disk.ended() == []  # two calls without a wait: steps run
    assert disk.load_s([]) == 1.0 + 2.0
    clock.wait_until(clock() + 2.9)
    assert disk.ended() == []
    clock.wait_until(clock() + 0.1)
    assert disk.ended() == [MoveEnd(101, True)]


def test_a_move_that_has_not_begun_is_cancelled_at_once() -> None:
    disk, clock = filled(1, 2, 3)
    disk.start(stores(4, 5), loads(1, 2, 3))
    disk.cancel([101, 103, 5])
    assert disk.ended() == [MoveEnd(103, False), MoveEnd(5, False)]
    clock.wait_until(clock() + 100.0)
    assert disk.ended() == [MoveEnd(4, True), MoveEnd(101, True), MoveEnd(102, True)]


def test_the_daily_limit_stops_stores_for_a_while() -> None:
    disk, clock = made(replace(SHAPE, bytes_a_day=4 * RECORD))
    disk.start(stores(1, 2), ())
    clock.wait_until(6.0)
    assert disk.ended() == [MoveEnd(1, True), MoveEnd(2, False)], "a quarter at once"
    taken: list[bool] = []
    for now_s in (6.0, 86400.0):
        clock.wait_until(now_s)
        taken.append(disk.takes_stores)
    assert taken == [False, True]
    assert not made(replace(SHAPE, bytes_a_day=0))[0].takes_stores


def test_a_full_queue_takes_no_more_stores() -> None:
    disk, _ = made()
    disk.start([StoreOrder(n, 0, 0, n.to_bytes(4, "big")) for n in range(5000)], ())
    assert not disk.takes_stores


def test_clearing_forgets_all_contents() -> None:
    disk, _ = filled(1)
    disk.clear()
    assert not disk.find(0, bytes([1]))


def test_a_folder_too_small_for_a_block_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="cache_size is 4096 bytes, but blocks of 4096"):
        made(replace(SHAPE, num_bytes=4096))


def test_segments_are_evicted_as_in_the_real_store(tmp_path: Path) -> None:
    """Both keep the same contents of those that are written and loaded at random."""
    rng = random.Random(5)
    opened = Opened(tmp_path, 40_000, 8_000)
    kept = KeptSegments(40_000, 8_000, lambda num_bytes: True)
    for number in range(300):
        write(opened.store, [number])
        order = order_of(number)
        kept.append(
            Record(order.group, order.name, order.parent, order.tokens, 0, NUM_BYTES, bytes(16))
        )
        names = [order_of(each).name for each in range(number + 1)]
        found = [name for name in names if opened.store.index.find(0, name)]
        assert found == [name for name in names if kept.index.find(0, name)]
        loaded = rng.sample(found, min(len(found), rng.randrange(4)))
        assert all(read(opened.store, loaded))
        kept.index.count_hits([(0, name) for name in loaded])
        parent = order_of(number % 3).name
        assert kept.index.tails(parent) == opened.store.index.tails(parent)
    assert opened.store.num_rewritten > 20
    opened.close()
