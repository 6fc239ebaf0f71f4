"""The host tier in front of a disk tier: what lies where, and what moves between them."""

import math
import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from tests.tiers.disk.faulty_files import FaultyFiles, broken_disk, full_disk
from tests.tiers.disk.store_world import FINGERPRINT
from tests.tiers.disk.tier_world import Clock
from tests.tiers.host.host_world import NUM_BLOCKS, HeldCopies, Orders, name_of, plain_copies

from quire.core.memory.tiers.contract import Tail, Tiers
from quire.tiers.disk.disk_tier import DiskBudget, DiskTier
from quire.tiers.disk.folder import CacheFolder
from quire.tiers.host.host_tier import HostTier
from quire.tiers.stack import TierStack

BLOCK_BYTES = 4096
PATIENCE_S = 60.0


class StackWorld(Orders):
    """Copies are carried out at once, unless `holds` says to wait."""

    def __init__(self, path: Path, num_slots: int, budget: DiskBudget | None = None) -> None:
        pool = torch.zeros((NUM_BLOCKS, BLOCK_BYTES), dtype=torch.uint8)
        self.clock = Clock()
        self.files = FaultyFiles()
        self.copies = HeldCopies(plain_copies(pool, num_slots))
        self.host = HostTier(self.copies)
        self.disk = DiskTier(
            CacheFolder.open(path, self.files),
            FINGERPRINT,
            budget or DiskBudget(64 << 20),
            self.copies.slots,
            [BLOCK_BYTES],
            lambda: None,
            self.clock,
        )
        self.stack = TierStack(self.host, self.disk)
        self.holds = False
        as_seam: Tiers = self.stack
        super().__init__(as_seam, pool)

    def end(self) -> None:
        if not self.copies.is_closed:
            self.take_in()
            self.stack.close()

    def take_in(self) -> None:
        if not self.holds:
            self.copies.carry_out()
        super().take_in()

    def wait(self, order_ids: list[int]) -> list[bool | None]:
        self.until(lambda: None not in self.results(order_ids))
        return self.results(order_ids)

    def settle(self) -> None:
        """Until the disk has what it takes."""
        self.take_in()
        self.until(lambda: not self.stack.counts()["host"]["num_behind"])

    def until(self, condition: Callable[[], object]) -> None:
        until_s = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < until_s, "it has not come"
            time.sleep(1e-3)
            self.take_in()

    def on_disk(self, *numbers: int) -> list[bool]:
        return [self.disk.find(0, name_of(number)) for number in numbers]

    def in_host(self, *numbers: int) -> list[bool]:
        return [self.host.find(0, name_of(number)) for number in numbers]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[..., StackWorld]]:
    worlds: list[StackWorld] = []

    def make(num_slots: int = 8, budget: DiskBudget | None = None) -> StackWorld:
        for world in worlds:
            world.end()
        worlds.append(StackWorld(tmp_path, num_slots, budget))
        return worlds[-1]

    yield make
    for world in worlds:
        world.end()


Opener = Callable[..., StackWorld]


def num_pinned(world: StackWorld) -> int:
    """Slots of the host tier that moves still read or write."""
    return world.host.table.num_slots - world.host.table.num_takeable


def test_a_block_is_given_back_before_the_disk_has_it(opened: Opener) -> None:
    world = opened()
    gate = world.files.write_gate = threading.Event()
    stored = world.store(range(4))
    assert world.results(stored) == [True] * 4
    assert all(world.in_host(*range(4))) and not any(world.on_disk(*range(4)))
    counts = world.stack.counts()
    assert counts["host"]["num_behind"] == 4
    assert counts["disk"]["queued_bytes"] == 4 * BLOCK_BYTES
    gate.set()
    world.settle()
    assert all(world.on_disk(*range(4)))
    assert num_pinned(world) == 0


def test_blocks_in_host_memory_are_not_read_from_disk(opened: Opener) -> None:
    world = opened()
    world.store(range(4))
    world.settle()
    loaded = world.load(range(4))
    assert world.results(loaded) == [True] * 4 and world.has(range(4))
    assert world.disk.counters().loads_done == 0
    assert world.host.counters().loads_done == 4


def test_the_next_process_reads_through_the_host(opened: Opener) -> None:
    opened().store(range(8))
    world = opened(num_slots=3)  # so that reads wait for slots
    assert all(world.stack.find(0, name_of(number)) for number in range(8))
    assert not any(world.in_host(*range(8)))
    loaded = world.load([*range(8), 99])
    assert world.wait(loaded) == [True] * 8 + [False] and world.has(range(8))
    assert sum(world.in_host(*range(8))) == 3, "what has come stays while there is room"
    assert num_pinned(world) == 0
    assert world.disk.counters().stores_done == 0, "it is on the disk already"


def test_both_tiers_serve_one_prefix(opened: Opener) -> None:
    opened().store(range(6))
    world = opened(num_slots=6)
    assert world.wait(world.load([0, 1])) == [True, True]
    contents = [(0, name_of(number)) for number in range(6)]
    of_host, of_both = world.stack.load_s(contents[:2]), world.stack.load_s(contents)
    assert 0 < of_host == world.host.load_s(contents[:2]) < of_both
    assert of_both == pytest.approx(of_host + world.disk.load_s(contents[2:]), rel=0.5)
    assert world.stack.load_s([*contents, (0, b"unknown")]) == math.inf
    world.holds = True
    loaded = world.load(range(6))
    world.until(lambda: len(world.copies.waiting) > 1)
    world.until(lambda: world.disk.counters().loads_done == 6)
    world.take_in()
    world.copies.carry_out(backwards=True)
    assert world.wait(loaded) == [True] * 6 and world.has(range(6))


def test_partial_blocks_are_found_in_host_and_disk_tiers(opened: Opener) -> None:
    opened().store([1], parent=b"parent", tokens=b"abcd")
    world = opened()
    tail = Tail(b"abcd", name_of(1))
    assert world.stack.tails(b"parent") == [tail] == world.disk.tails(b"parent")
    world.store([2], parent=b"parent", tokens=b"abcdefgh")
    world.take_in()
    assert world.stack.tails(b"parent") == [Tail(b"abcdefgh", name_of(2)), tail]
    world.settle()
    assert len(world.stack.tails(b"parent")) == 2
    assert world.disk.tails(b"parent")[0].tokens == b"abcdefgh"


def test_blocks_that_a_full_disk_refuses_are_written_later(opened: Opener) -> None:
    world = opened()
    world.files.errors["pwritev"] = world.files.errors["create"] = full_disk()
    assert world.wait(world.store(range(3))) == [True] * 3, "the host has it"
    world.until(lambda: world.disk.counters().store_failures)
    world.until(lambda: not world.disk.takes_stores)
    world.store([3])
    world.take_in()
    world.until(lambda: not world.stack._writing)
    assert world.stack.counts()["host"]["num_behind"] == 4
    world.files.errors.clear()
    world.clock.now_s += 100
    world.settle()
    assert all(world.on_disk(*range(4)))


def test_blocks_that_wait_too_long_for_the_disk_count_as_lost(opened: Opener) -> None:
    world = opened(num_slots=4, budget=DiskBudget(64 << 20, bytes_a_day=0))
    for number in range(6):
        assert world.results(world.store([number])) == [True]
    assert world.stack.counts()["host"]["num_behind"] == 6
    assert sum(world.in_host(*range(6))) == 4 and not any(world.on_disk(*range(6)))
    assert world.disk.counters().stores_failed == 0, "none was tried"


def test_while_the_disk_pauses_the_host_serves_alone(opened: Opener) -> None:
    opened().store(range(4))
    world = opened()
    assert world.wait(world.load([0])) == [True]
    world.files.errors["preadv"] = broken_disk()
    assert world.wait(world.load([1])) == [False]
    assert world.stack.find(0, name_of(0)) and not world.stack.find(0, name_of(2))
    assert world.stack.load_s([(0, name_of(0))]) < math.inf
    assert world.wait(world.load([0])) == [True] and world.has([0])
    assert world.wait(world.store([2])) == [True], "what can't be read is kept in the host"
    world.files.errors.clear()
    world.clock.now_s += 100
    world.take_in()
    assert world.stack.find(0, name_of(3))


def test_cancelled_loads_end_wherever_they_are(opened: Opener) -> None:
    opened().store(range(8))
    world = opened(num_slots=2)
    gate = world.files.gate = threading.Event()
    loaded = world.load(range(6))
    world.stack.cancel(loaded)
    assert world.results(loaded)[2:] == [False] * 4, "those had no slot yet"
    gate.set()
    assert None not in world.wait(loaded)
    assert num_pinned(world) == 0
    assert world.wait(world.load(range(6))) == [True] * 6 and world.has(range(6))


def test_cleared_contents_are_nowhere(opened: Opener) -> None:
    opened().store(range(4))
    world = opened()
    world.wait(world.load([0]))
    gate = world.files.gate = threading.Event()
    reading, world.holds = world.load([1]), True
    stored = world.store([9])
    world.stack.clear()
    world.holds = False
    gate.set()
    assert None not in world.wait([*reading, *stored])
    world.settle()
    numbers = (0, 1, 2, 3, 9)
    assert not any(world.stack.find(0, name_of(number)) for number in numbers)
    world.until(lambda: num_pinned(world) == 0)


def test_the_end_writes_what_only_the_host_has(opened: Opener) -> None:
    world = opened(num_slots=32)
    world.store(range(30))
    world.copies.carry_out()
    world.stack.close()
    assert world.copies.is_closed
    assert all(opened().on_disk(*range(30)))


def test_a_wait_sees_both_tiers(opened: Opener) -> None:
    opened().store(range(4))
    world = opened()
    world.stack.wait(1e-3)
    loaded = world.load([0, 1])
    world.until(lambda: world.copies.waiting or world.disk.counters().loads_done == 2)
    world.copies.carry_out()
    world.stack.wait(1e-3)
    assert world.wait(loaded) == [True, True] and world.has([0, 1])


@pytest.mark.parametrize("seed", range(6))
def test_any_order_of_ends_brings_the_right_bytes(opened: Opener, seed: int) -> None:
    """A block is in one order at a time, as the memory keeps it; copies end at random."""
    rng = random.Random(seed)
    world = opened(num_slots=rng.choice((4, 12)))
    world.holds = True
    busy: dict[int, tuple[int, bool]] = {}  # the number in each order, and whether it is loaded
    num_loaded = 0
    for step in range(150):
        used = {number for number, _ in busy.values()}
        number = rng.choice([each for each in range(NUM_BLOCKS) if each not in used])
        action = rng.random()
        if action < 0.35 and not world.stack.find(0, name_of(number)):
            busy |= dict.fromkeys(world.store([number]), (number, False))
        elif action < 0.75:
            busy |= dict.fromkeys(world.load([number]), (number, True))
        elif action < 0.8:
            world.stack.cancel([each for each, (_, is_load) in busy.items() if is_load][:2])
        elif step == 100:
            world.stack.clear()
        rng.shuffle(world.copies.waiting)
        for _ in range(rng.randrange(3)):
            if world.copies.waiting:
                world.copies.waiting.pop().carry_out()
        if rng.random() < 0.2:
            world.stack.wait(1e-3)
        world.take_in()
        for order_id in [each for each in busy if each in world.ends]:
            number, is_load = busy.pop(order_id)
            if is_load and world.ends[order_id]:
                num_loaded += 1
                assert world.has([number])
    world.holds = False
    assert None not in world.wait(list(busy))
    world.settle()
    assert num_loaded > 0 and num_pinned(world) == 0
