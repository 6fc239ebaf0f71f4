"""The thread that writes: clearing, a day's bytes, and a disk that hangs beside its writes."""

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.tiers.disk.faulty_files import FaultyFiles, full_disk
from tests.tiers.disk.store_world import name_of, segments
from tests.tiers.disk.tier_world import NUM_BLOCKS, World, until

from quire.tiers.disk.disk_tier import DiskBudget
from quire.tiers.disk.files import Buffer
from quire.tiers.disk.folder import CacheFolder
from quire.tiers.disk.io_limits import Spent
from quire.tiers.disk.write_behind import StoreWriter


def test_a_disk_that_hangs_while_it_keeps_what_is_spent_gives_up_what_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, is_inside = threading.Event(), threading.Event()

    def write_spent(folder: CacheFolder, spent: Spent) -> None:
        is_inside.set()
        gate.wait()

    monkeypatch.setattr(CacheFolder, "write_spent", write_spent)
    world = World(tmp_path, budget=DiskBudget(64 << 20, bytes_a_day=64 << 20))
    hung = world.store([1])
    assert is_inside.wait(60)
    waiting = world.store(range(2, 10))
    world.clock.now_s += 11
    assert world.wait(waiting) == [False] * 8
    assert not world.tier.takes_stores and not world.have_ended(hung)
    assert not world.tier.counters().is_writing
    gate.set()
    world.wait(hung)
    world.tier.close()


def test_blocks_taken_before_a_clearing_are_not_found(tmp_path: Path) -> None:
    files = FaultyFiles()
    world = World(tmp_path, files)
    world.wait(world.store(range(3)))
    files.write_gate = threading.Event()
    under_way = world.store([10])
    until(lambda: world.tier._writer._since_s is not None, "the write begins")
    world.tier.clear()
    files.write_gate.set()
    world.wait(under_way)
    assert not any(world.tier.find(0, name_of(number)) for number in (0, 1, 2, 10))
    files.write_gate = None
    with pytest.MonkeyPatch.context() as patch:
        take, is_taken, gate = StoreWriter._next_orders, threading.Event(), threading.Event()

        def wait_with(writer: StoreWriter) -> Any:
            taken = take(writer)
            if taken[0]:
                is_taken.set()
                gate.wait()
            return taken

        patch.setattr(StoreWriter, "_next_orders", wait_with)
        gate.set()
        world.wait(world.store([20]))
        gate.clear()
        is_taken.clear()
        in_hand = world.store([21])
        assert is_taken.wait(60)
        world.tier.clear()
        again = world.store([22])
        gate.set()
        assert world.wait([*in_hand, *again]) == [False, True]
    found = [number for number in (20, 21, 22) if world.tier.find(0, name_of(number))]
    assert found == [22]
    world.tier.close()


def test_blocks_ordered_after_a_clearing_are_written_by_close(tmp_path: Path) -> None:
    files = FaultyFiles()
    world = World(tmp_path, files)
    until(lambda: world.tier._writer._is_prepared, "the writer is ready")
    files.write_gate = threading.Event()
    under_way = world.store([10])
    until(lambda: world.tier._writer._since_s is not None, "the write begins")
    world.tier.clear()
    behind = world.store([1, 2])
    threading.Timer(0.1, files.write_gate.set).start()
    world.tier.close()
    assert world.wait([*under_way, *behind])[1:] == [True, True]
    again = World(tmp_path)
    assert [number for number in range(12) if again.tier.find(0, name_of(number))] == [1, 2]
    again.tier.close()


@pytest.mark.parametrize("call", ["pwritev", "unlink"])
def test_files_that_a_clearing_cannot_remove_are_removed_later(tmp_path: Path, call: str) -> None:
    files = FaultyFiles()
    world = World(tmp_path, files)
    world.wait(world.store(range(40)))
    files.errors[call] = full_disk()
    world.tier.clear()
    until(lambda: world.tier._writer._queue.empty(), "the writer takes it")
    until(lambda: world.tier._writer._since_s is None, "the writer has tried")
    files.errors.clear()
    world.clock.now_s += 100
    assert world.wait(world.store([50])) == [True]
    world.tier.close()
    again = World(tmp_path)
    assert [number for number in range(60) if again.tier.find(0, name_of(number))] == [50]
    again.tier.close()


def test_rewritten_blocks_count_in_the_daily_budget(quick_path: Path) -> None:
    """A folder that is full, and in which all is loaded before it goes."""
    written = 0

    class CountingFiles(FaultyFiles):
        def pwritev(self, descriptor: int, buffers: Sequence[Buffer], offset: int) -> int:
            nonlocal written
            num_bytes = super().pwritev(descriptor, buffers, offset)
            written += num_bytes
            return num_bytes

    day_bytes = 16 << 20
    world = World(quick_path, CountingFiles(), DiskBudget(2 << 20, bytes_a_day=day_bytes))
    begin = 0
    while world.tier.counters().over_budget == 0:
        world.wait(world.store(range(begin, begin + 32)))
        kept = [number for number in range(begin + 32) if world.tier.find(0, name_of(number))]
        for at in range(0, len(kept), NUM_BLOCKS):
            world.wait(world.load(kept[at : at + NUM_BLOCKS]))
        begin += 32
    assert world.tier.counters().rewritten > 50
    assert day_bytes / 4 * 0.9 < written < day_bytes / 4 * 1.03, "3%: footers and the like"
    world.tier.close()


def test_without_bytes_a_day_nothing_is_written(tmp_path: Path) -> None:
    """Not even to bring the folder within its size, or to seal what a kill has left."""
    world = World(tmp_path)
    for begin in range(0, 300, 60):
        world.wait(world.store(range(begin, begin + 60)))
    world.tier.close()
    [segment] = segments(tmp_path)
    for content in (segment.read_bytes(), segment.read_bytes()[:-100]):
        segment.write_bytes(content)
        files = FaultyFiles()
        reading = World(tmp_path, files, DiskBudget(1_100_000, bytes_a_day=0))
        calls = files.calls.copy()
        assert reading.wait(reading.load(range(60))) == [True] * 60
        assert reading.wait(reading.store([999])) == [False]
        reading.tier.close()
        assert segment.read_bytes() == content
        changed = {"create", "pwritev", "truncate", "unlink", "sync_data", "rename"}
        assert all(files.calls[name] == calls[name] for name in changed)
