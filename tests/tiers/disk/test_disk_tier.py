"""The tier with its threads: orders and how they end, whatever the disk does."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tests.tiers.disk.faulty_files import (
    FaultyFiles,
    broken_disk,
    disk_bytes,
    full_disk,
    read_only,
)
from tests.tiers.disk.left_open import nothing_left_open
from tests.tiers.disk.store_world import FINGERPRINT, name_of, segments
from tests.tiers.disk.tier_world import NUM_BLOCKS, SIZES, World, contents, until

from quire.core.memory.tiers.contract import StoreOrder, Tail, Tiers
from quire.errors import ConfigurationError
from quire.tiers.disk import write_behind
from quire.tiers.disk.disk_tier import DiskBudget, DiskTier
from quire.tiers.disk.folder import CacheFolder
from quire.tiers.disk.io_limits import DAY_S
from quire.tiers.disk.loader import HANG_S, MAX_READERS, NUM_READERS

pytestmark = pytest.mark.usefixtures("each_reader")


def test_stored_blocks_are_found_by_the_next_process(tmp_path: Path) -> None:
    world = World(tmp_path)
    as_seam: Tiers = world.tier
    assert as_seam.takes_stores and not as_seam.find(0, name_of(1))
    assert all(world.wait([*world.store(range(50)), *world.store(range(50, 64), group=1)]))
    assert as_seam.find(0, name_of(1)) and not as_seam.find(1, name_of(1))
    assert all(world.wait(world.store(range(5)))), "what is there already is done"
    assert all(world.wait(world.load(range(50)))) and world.has(range(50))
    world.tier.close()
    again = World(tmp_path)
    loaded = [*again.load(range(50)), *again.load(range(50, 64), group=1)]
    assert all(again.wait(loaded))
    assert again.has(range(50)) and again.has(range(50, 64), group=1)
    counters = again.tier.counters()
    assert (counters.num_records, counters.loads_done) == (64, 64)
    assert counters.loaded_bytes == 50 * SIZES[0] + 14 * SIZES[1]
    assert counters.used_bytes >= counters.loaded_bytes
    assert counters.loads_failed == counters.damaged == counters.load_failures == 0
    again.tier.close()


def test_missing_blocks_are_misses(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.wait(world.store([1]))
    assert world.wait(world.load([1, 2, 3])) == [True, False, False]
    assert world.tier.counters().loads_failed == 2
    assert world.wait(world.load([1], group=1)) == [False]
    world.tier.close()


def test_tails_are_listed_by_what_they_follow(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.tier.start([StoreOrder(99, 0, 0, b"n" * 18, b"parent", b"12345678")], ())
    assert world.wait([99]) == [True]
    assert list(world.tier.tails(b"parent")) == [Tail(b"12345678", b"n" * 18)]
    assert list(world.tier.tails(b"other")) == []
    world.tier.close()


def test_one_content_from_two_blocks_is_written_once(tmp_path: Path) -> None:
    files = FaultyFiles()
    files.write_gate = threading.Event()
    files.write_gate.set()
    world = World(tmp_path, files)
    files.write_gate.clear()
    first = world.store([1, 2])
    until(lambda: world.tier.counters().queued_bytes == 0, "the writer takes them")
    second = world.store([1, 2, 2])
    files.write_gate.set()
    assert all(world.wait([*first, *second]))
    assert world.tier.counters().stored_bytes == 2 * SIZES[0]
    world.tier.close()


def test_names_that_no_record_can_hold_are_refused(tmp_path: Path) -> None:
    world = World(tmp_path)
    for order in (
        StoreOrder(1, 0, 0, b"n" * 19),
        StoreOrder(1, 0, 0, b""),
        StoreOrder(1, 0, 0, b"n", b"p" * 19, b"1234"),
        StoreOrder(1, 0, 256, b"n"),
        StoreOrder(1, 0, 0, b"n", b"p", bytes(1 << 16)),
    ):
        with pytest.raises(ValueError, match="can't be stored"):
            world.tier.start([order], ())
    world.tier.close()


# -- cancelled, late, never ------------------------------------------------------------------------


def test_a_read_that_hangs_keeps_only_its_own_blocks(tmp_path: Path) -> None:
    files = FaultyFiles()
    world = World(tmp_path, files)
    world.wait(world.store(range(20)))
    gate = files.gate = threading.Event()
    hung = world.load([0])
    until(lambda: files.num_at_gate, "taken")
    files.gate = None
    assert all(world.wait(world.load(range(1, 10)))), "another reader goes on"
    world.clock.now_s += HANG_S + 1
    assert not world.have_ended(hung)
    assert world.tier.load_s(contents(1, 0)) == float("inf"), "paused for a second"
    assert not world.tier.counters().is_reading
    world.clock.now_s += 1.5
    assert world.tier.load_s(contents(1, 0)) < 1
    assert all(world.wait(world.load(range(10, 20)))) and world.has(range(1, 20))
    world.tier.cancel(hung)
    assert not world.have_ended(hung), "its block may still be written to"
    gate.set()
    assert world.wait(hung) == [True] and world.has([0])
    assert not any(reader.is_hung for reader in world.tier._loader._readers)
    assert world.tier.counters().load_failures == 1
    world.tier.close()


def test_waiting_loads_end_and_close_returns_when_all_reads_hang(tmp_path: Path) -> None:
    files = FaultyFiles()
    world = World(tmp_path, files)
    world.wait(world.store(range(20)))
    gate = files.gate = threading.Event()
    hung = []
    for number in range(MAX_READERS):  # each takes a reader, old or new
        hung += world.load([number])
        until(lambda: not world.tier._loader._requests, "a reader takes it")
        world.clock.now_s += HANG_S + 1
        world.have_ended(hung)
    waiting = world.load(range(10, 20))
    assert world.wait(waiting) == [False] * 10
    assert world.tier.load_s(contents(1, 1)) == float("inf")
    world.clock.now_s += 600  # beyond each pause after a failure
    assert not world.tier.counters().is_reading
    assert not world.have_ended(hung)
    begun_s = time.monotonic()
    world.tier.close(timeout_s=0.1)
    assert time.monotonic() - begun_s < 20
    CacheFolder.open(tmp_path).close()
    gate.set()
    assert all(world.wait(hung))


def test_a_write_that_hangs_gives_up_what_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = FaultyFiles()
    world = World(tmp_path, files)
    until(lambda: world.tier._writer._is_prepared, "the writer is ready")
    gate = files.write_gate = threading.Event()
    hung = world.store([1])
    until(lambda: world.tier._writer._since_s is not None, "the write begins")
    waiting = world.store(range(2, 10))
    assert not world.have_ended(waiting) and world.tier.takes_stores
    world.clock.now_s += 11
    assert world.wait(waiting) == [False] * 8
    assert not world.tier.takes_stores and not world.have_ended(hung)
    assert world.wait(world.store([11])) == [False]
    assert world.wait(world.load([5])) == [False], "loads go on"
    monkeypatch.setattr(write_behind, "SEAL_S", 0.1)
    begun_s = time.monotonic()
    world.tier.close(timeout_s=0.1)
    assert time.monotonic() - begun_s < 20
    with pytest.raises(ConfigurationError, match="in use"):
        CacheFolder.open(tmp_path)
    gate.set()
    assert world.wait(hung) == [True]


def test_orders_cancelled_before_they_begin_end_undone(tmp_path: Path) -> None:
    files = FaultyFiles()
    world = World(tmp_path, files)
    world.wait(world.store(range(11)))
    gate = files.gate = threading.Event()
    taken = []
    for number in range(NUM_READERS):
        taken += world.load([number])
        until(lambda: not world.tier._loader._requests, "a reader takes it")
    loads = world.load(range(3, 11))
    world.tier.cancel([*loads[:4], 12345])
    assert world.wait(loads[:4]) == [False] * 4
    assert not world.have_ended(loads[4:])
    gate.set()
    assert all(world.wait([*taken, *loads[4:]])) and world.has([0, 1, 2, 7, 8, 9, 10])
    assert (world.storage[3:7] == 0xEE).all(), "what was cancelled is not touched"
    world.tier.cancel(loads)
    files.write_gate = threading.Event()
    held = world.store([20])
    until(lambda: world.tier.counters().queued_bytes == 0, "the writer takes it")
    stores = world.store([21, 22])
    world.tier.cancel(stores)
    assert world.wait(stores) == [False, False]
    files.write_gate.set()
    assert world.wait(held) == [True] and not world.tier.find(0, name_of(21))
    counters = world.tier.counters()
    assert (counters.loads_cancelled, counters.stores_cancelled) == (4, 2)
    assert world.tier._loader.num_bytes_ahead == counters.queued_bytes == 0
    world.tier.close()


def test_close_writes_what_was_ordered(tmp_path: Path) -> None:
    files = FaultyFiles()
    world = World(tmp_path, files)
    files.write_gate = threading.Event()
    stores = world.store(range(60))
    threading.Timer(0.05, files.write_gate.set).start()
    world.tier.close()
    assert all(world.wait(stores))
    [segment] = segments(tmp_path)
    assert b"QUIREEND" in segment.read_bytes()[-64:]
    late = [*world.store([61]), *world.load([1])]
    assert world.wait(late) == [False, False] and not world.tier.takes_stores
    assert world.tier.load_s(contents(1, 1)) == float("inf")


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    with nothing_left_open():
        for _ in range(3):
            world = World(tmp_path)
            world.wait(world.store(range(30)))
            world.wait(world.load(range(40)))
            world.tier.close()
    assert {path.suffix for path in tmp_path.rglob("*") if path.is_file()} == {"", ".seg"}


# -- a disk that fails -----------------------------------------------------------------------------


@pytest.mark.parametrize("error", [full_disk, broken_disk, read_only])
def test_a_disk_that_cannot_be_written_pauses_stores_and_comes_back(
    tmp_path: Path, error: Callable[[], OSError], caplog: pytest.LogCaptureFixture
) -> None:
    files = FaultyFiles()
    world = World(tmp_path, files)
    world.wait(world.store([1]))
    caplog.set_level("INFO")
    caplog.clear()
    files.errors["pwritev"] = error()
    for seconds in (1, 2, 4):
        assert world.tier.takes_stores
        assert world.wait(world.store([2, 3])) == [False, False]
        assert not world.tier.takes_stores and not world.tier.counters().is_writing
        assert world.wait(world.store([4])) == [False], "during the pause nothing is tried"
        assert all(world.wait(world.load([1]))), "loads go on"
        world.clock.now_s += seconds
    assert world.tier.counters().store_failures == 3
    assert len([entry for entry in caplog.records if entry.levelname == "WARNING"]) == 1
    files.errors = {}
    assert all(world.wait(world.store([2, 3])))
    assert world.tier.takes_stores and "works again" in caplog.text
    world.tier.close()


def test_a_disk_that_cannot_be_read_pauses_loads_and_comes_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = FaultyFiles()
    world = World(tmp_path, files)
    world.wait(world.store(range(20)))
    files.errors["preadv"] = broken_disk()
    assert not any(world.wait(world.load(range(5))))
    assert world.tier.load_s(contents(1, 0)) == float("inf")
    assert not world.tier.find(0, name_of(1)), "what can't be read is not there"
    files.errors = {}
    world.clock.now_s += 1.1
    assert world.tier.load_s(contents(1, 0)) < 1
    assert all(world.wait(world.load(range(5, 20)))) and world.has(range(5, 20))
    assert "loads: paused: [Errno 5]" in caplog.text
    assert world.tier.counters().load_failures == 1
    world.tier.close()


def test_a_read_only_folder_serves_loads_alone(tmp_path: Path) -> None:
    before = World(tmp_path)
    before.wait(before.store(range(10)))
    before.tier.close()
    size = disk_bytes(tmp_path)
    files = FaultyFiles()
    for name in ("open_to_write", "create", "pwritev", "truncate", "unlink", "rename"):
        files.errors[name] = read_only()
    world = World(tmp_path, files)
    until(lambda: not world.tier.takes_stores, "the first write fails")
    assert all(world.wait(world.load(range(10)))) and world.has(range(10))
    assert world.wait(world.store([50])) == [False]
    world.tier.close()
    assert disk_bytes(tmp_path) == size


def test_a_segment_that_cannot_be_listed_is_no_reason_to_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before = World(tmp_path)
    before.wait(before.store(range(10)))
    before.tier.close()
    files = FaultyFiles()
    [segment] = segments(tmp_path)
    files.fails_when = lambda name, given: (
        broken_disk() if name == "open_to_read" and given[0] == segment else None
    )
    world = World(tmp_path, files)
    assert not world.tier.find(0, name_of(1)) and "can't be read" in caplog.text
    assert all(world.wait(world.store([1])))
    world.tier.close()


def test_the_bytes_of_a_day_bound_what_is_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    record_bytes = SIZES[0] + 128
    world = World(tmp_path, budget=DiskBudget(64 << 20, bytes_a_day=40 * record_bytes))
    done = world.wait(world.store(range(20)))
    assert done == [True] * 10 + [False] * 10
    assert not world.tier.takes_stores
    assert world.tier.counters().over_budget == 10
    world.clock.now_s += DAY_S / 30 + 1
    assert world.tier.takes_stores
    assert world.wait(world.store([10])) == [True]
    assert len([entry for entry in caplog.records if "daily limit" in entry.message]) == 1
    world.tier.close()


def test_a_queue_that_is_full_drops_stores(tmp_path: Path) -> None:
    files = FaultyFiles()
    world = World(tmp_path, files)
    until(lambda: world.tier._writer._is_prepared, "the writer is ready")
    world.tier._writer._max_queued_bytes = 4 * SIZES[0]
    files.write_gate = threading.Event()
    first = world.store([0])
    until(lambda: world.tier.counters().queued_bytes == 0, "the writer takes it")
    more = world.store(range(1, 5))
    assert not world.tier.takes_stores
    more += world.store(range(5, 12))
    files.write_gate.set()
    assert world.wait([*first, *more]) == [True] * 9 + [False] * 3
    assert world.tier.counters().over_queue == 3 and world.tier.takes_stores
    world.tier.close()


def test_the_budget_holds_while_the_tier_runs(quick_path: Path) -> None:
    budget = 2 << 20
    world = World(quick_path, budget=DiskBudget(budget))
    seen = []
    for begin in range(0, 1000, 50):
        world.wait(world.store(range(begin, begin + 50)))
        world.wait(world.load(range(begin, begin + 20)))
        seen.append(disk_bytes(quick_path))
    assert budget * 0.7 < max(seen) <= budget * 9 / 8
    assert world.tier.find(0, name_of(999)) and not world.tier.find(0, name_of(1))
    world.tier.close()
    assert world.tier.counters().used_bytes == disk_bytes(quick_path)


# -- what it is asked and given --------------------------------------------------------------------


def test_predictions_count_what_is_ahead(tmp_path: Path) -> None:
    files = FaultyFiles()
    world = World(tmp_path, files)
    world.wait(world.store(range(60)))
    alone_s = world.tier.load_s(contents(10, 0))
    assert 0 < world.tier.load_s(contents(0, 1)) < alone_s < world.tier.load_s(contents(60, 0))
    gate = files.gate = threading.Event()
    loads = world.load(range(60))
    begun_s = world.tier.load_s(contents(10, 0))
    assert begun_s > alone_s
    while not any(reader.since_s is not None for reader in world.tier._loader._readers):
        time.sleep(0.001)
    world.clock.now_s += 1.0
    assert world.tier.load_s(contents(10, 0)) > 100 * begun_s, "a read that goes on says something"
    gate.set()
    assert all(world.wait(loads))
    counters = world.tier.counters()
    assert counters.predicted_load_s > 0 and counters.bytes_per_s > 0 and counters.latency_s > 0
    world.tier.close()


@pytest.mark.parametrize(
    ("storage", "sizes", "message"),
    [
        (np.zeros((4, 64), np.int8), [64], "uint8"),
        (np.zeros(64, np.uint8), [64], "uint8"),
        (np.zeros((4, 64), np.uint8)[:, :32], [32], "contiguous"),
        (np.frombuffer(bytes(64), np.uint8).reshape(1, 64), [64], "writable"),
        (np.zeros((4, 64), np.uint8), [65], "bytes_of_group"),
        (np.zeros((4, 64), np.uint8), [], "bytes_of_group"),
        (np.zeros((4, 64), np.uint8), [64, 0], "bytes_of_group"),
    ],
)
def test_a_pool_that_is_no_plain_memory_is_refused(
    tmp_path: Path, storage: np.ndarray, sizes: list[int], message: str
) -> None:
    folder = CacheFolder.open(tmp_path)
    with pytest.raises(ValueError, match=message):
        DiskTier(folder, FINGERPRINT, DiskBudget(1 << 30), storage, sizes, lambda: None)
    folder.close()


def test_budgets_are_above_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="num_bytes must be above 0"):
        DiskBudget(0)
    with pytest.raises(ValueError, match="num_bytes must be above 0"):
        DiskBudget(1 << 30, -1)
    with pytest.raises(ConfigurationError, match="give a larger cache_size"):
        World(tmp_path, budget=DiskBudget(1 << 20))


def test_many_orders_from_many_steps_end_once_each(tmp_path: Path) -> None:
    """Stores, loads and cancellations at random; what came is right."""
    world = World(tmp_path)
    generator = np.random.default_rng(7)
    stored = world.store(range(NUM_BLOCKS))
    world.wait(stored)
    for _ in range(60):
        numbers = generator.choice(NUM_BLOCKS, 12, replace=False).tolist()
        loads = world.load(numbers)
        world.tier.cancel(generator.choice(loads, 3).tolist())
        done = world.wait(loads)
        assert sum(done) >= 9
        came = [number for number, is_done in zip(numbers, done, strict=True) if is_done]
        assert world.has(came)
        again = world.load([number for number in numbers if number not in came])
        assert all(world.wait(again))
    world.tier.close()


def test_a_file_that_cannot_be_closed_ends_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = FaultyFiles()
    world = World(tmp_path, files)
    assert all(world.wait(world.store([1])) + world.wait(world.load([1])))
    files.errors["close"] = broken_disk()
    world.tier.close()
    assert "closed with an error" in caplog.text
    files.errors.clear()
    files.release()
    refusing = FaultyFiles()
    refusing.errors |= {"close": broken_disk(), "names": broken_disk()}
    with pytest.raises(ConfigurationError, match="can't be used"):
        CacheFolder.open(tmp_path, refusing)
    refusing.errors.clear()
    refusing.release()
    again = World(tmp_path)
    assert all(again.wait(again.load([1]))) and again.has([1])
    again.tier.close()


@pytest.mark.parametrize("name", ["read", "append"])
def test_a_fault_in_a_thread_ends_its_orders_and_not_the_thread(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    world = World(tmp_path)
    assert all(world.wait(world.store(range(8))))

    def fail(*_: object) -> None:
        raise MemoryError("no more")

    with monkeypatch.context() as broken:
        broken.setattr(world.tier.store, name, fail)
        orders = [*world.store(range(8, 10)), *world.load(range(4))]
        ended = world.wait(orders)
    assert ended == [name == "read"] * 2 + [name == "append"] * 4
    assert "internal error of quire" in caplog.text and "MemoryError: no more" in caplog.text
    world.clock.now_s += 60.0  # the pause is over
    assert all(world.wait([*world.store(range(10, 12)), *world.load(range(4))]))
    world.tier.close()
