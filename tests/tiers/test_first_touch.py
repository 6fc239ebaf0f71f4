"""Memory is asked for before it is written, which changes no byte, and only while that may be."""

import ctypes
import mmap
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.tiers.disk.faulty_files import FaultyFiles
from tests.tiers.disk.store_world import FINGERPRINT, NUM_BYTES, Opened, write
from tests.tiers.disk.tier_world import until

from quire.tiers.disk.disk_tier import DiskBudget, DiskTier
from quire.tiers.disk.folder import CacheFolder
from quire.tiers.first_touch import PART_BYTES, POPULATE_WRITE, FirstTouch

PAGES = 64
SIZE = PAGES * mmap.PAGESIZE

Memory = NDArray[np.uint8]


@pytest.fixture
def memory() -> Iterator[Memory]:
    """Zeros that the system has not given yet."""
    mapped = mmap.mmap(-1, SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory = np.frombuffer(mapped, np.uint8)
    if not is_populated_on_request(memory):
        pytest.skip("this system gives memory only as it is written")
    yield memory


def is_populated_on_request(memory: Memory) -> bool:
    if not sys.platform.startswith("linux"):
        return False
    libc = ctypes.CDLL(None)
    address = ctypes.c_void_p(memory.ctypes.data)
    return bool(libc.madvise(address, ctypes.c_size_t(0), POPULATE_WRITE) == 0)


def num_resident(memory: Memory) -> int:
    """Pages that the system has given."""
    residency = (ctypes.c_ubyte * PAGES)()
    address, size = ctypes.c_void_p(memory.ctypes.data), ctypes.c_size_t(SIZE)
    assert ctypes.CDLL(None).mincore(address, size, residency) == 0
    return sum(each & 1 for each in residency)


def test_whole_pages_of_the_range_are_given_and_keep_their_bytes(memory: Memory) -> None:
    memory[20 * mmap.PAGESIZE + 3] = 7
    touch = FirstTouch(memory.ctypes.data + 1, 40 * mmap.PAGESIZE, lambda: True)
    until(lambda: touch.num_bytes_touched == 39 * mmap.PAGESIZE, "all is given")
    touch.stop()
    assert 39 <= num_resident(memory) <= 40
    assert memory[20 * mmap.PAGESIZE + 3] == 7 and memory.sum() == 7


def test_nothing_is_asked_for_while_it_may_not_or_after_a_stop(memory: Memory) -> None:
    asked: list[None] = []
    touch = FirstTouch(memory.ctypes.data, SIZE, lambda: asked.append(None) is not None)
    until(lambda: len(asked) > 2, "it looks whether it may")
    touch.stop()
    touch.stop()
    assert touch.num_bytes_touched == num_resident(memory) == 0


def test_as_much_is_asked_for_as_was_found(tmp_path: Path, memory: Memory) -> None:
    """And no more than the pool has."""
    num_records = SIZE // 4 // NUM_BYTES
    opened = Opened(tmp_path)
    write(opened.store, range(num_records))
    opened.close()
    tier = DiskTier(
        CacheFolder.open(tmp_path, FaultyFiles()),
        *(FINGERPRINT, DiskBudget(64 << 20), memory.reshape(PAGES, mmap.PAGESIZE)),
        *([NUM_BYTES], lambda: None),
    )
    own_bytes = tier.store.own_bytes
    assert SIZE // 4 < own_bytes < SIZE // 2 < PART_BYTES
    until(lambda: num_resident(memory) == own_bytes // mmap.PAGESIZE, "it is given")
    tier.close()
