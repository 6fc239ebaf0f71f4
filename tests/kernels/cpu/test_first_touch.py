"""Memory is asked for before it is written, which changes no byte, and only while that may be."""

import ctypes
import gc
import mmap
import sys
import threading
import time
from collections.abc import Callable

import pytest
import torch

from quire.kernels.cpu.memory import POPULATE_WRITE, FirstTouch

NUM_PAGES = 64
PATIENCE_S = 60.0


@pytest.fixture
def memory() -> torch.Tensor:
    """Zeros that the system has not given yet."""
    num_bytes = NUM_PAGES * mmap.PAGESIZE
    mapped = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory = torch.frombuffer(mapped, dtype=torch.uint8)
    if not is_populated_on_request(memory):
        pytest.skip("this system gives memory only as it is written")
    return memory


def is_populated_on_request(memory: torch.Tensor) -> bool:
    if not sys.platform.startswith("linux"):
        return False
    address = ctypes.c_void_p(memory.data_ptr())
    result: int = ctypes.CDLL(None).madvise(address, ctypes.c_size_t(0), POPULATE_WRITE)
    return result == 0


def num_resident(memory: torch.Tensor) -> int:
    """Pages that the system has given."""
    residency = (ctypes.c_ubyte * NUM_PAGES)()
    address, size = ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(memory.nbytes)
    assert ctypes.CDLL(None).mincore(address, size, residency) == 0
    return sum(each & 1 for each in residency)


def until(condition: Callable[[], bool], what: str) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end_s, what
        time.sleep(0.001)


def test_whole_pages_of_the_first_bytes_are_given_and_keep_what_is_in_them(
    memory: torch.Tensor,
) -> None:
    memory[20 * mmap.PAGESIZE + 3] = 7
    wanted = 40 * mmap.PAGESIZE
    part = memory[1:]
    touch = FirstTouch(part, wanted, lambda: True)
    until(lambda: touch.num_bytes_touched == wanted - mmap.PAGESIZE, "all whole pages")
    touch.stop()
    assert wanted - mmap.PAGESIZE <= num_resident(memory) * mmap.PAGESIZE <= wanted
    assert memory[20 * mmap.PAGESIZE + 3] == 7 and memory.sum() == 7


def test_first_touch_stops_at_the_end_of_the_memory(memory: torch.Tensor) -> None:
    touch = FirstTouch(memory, 2 * memory.nbytes, lambda: True)
    until(lambda: touch.num_bytes_touched == memory.nbytes, "all of it")
    assert num_resident(memory) == NUM_PAGES


def test_nothing_is_asked_for_while_it_may_not_nor_after_a_stop(memory: torch.Tensor) -> None:
    asked = threading.Event()

    def may_go_on() -> bool:
        asked.set()
        return False

    touch = FirstTouch(memory, memory.nbytes, may_go_on)
    assert asked.wait(PATIENCE_S)
    touch.stop()
    touch.stop()
    assert touch.num_bytes_touched == num_resident(memory) == 0


def test_it_ends_with_the_tensor(memory: torch.Tensor) -> None:
    is_gone = threading.Event()
    view = memory[:]
    touch = FirstTouch(view, view.nbytes, is_gone.is_set)
    del view
    gc.collect()
    is_gone.set()
    until(lambda: not touch._thread.is_alive(), "it ends")
    assert touch.num_bytes_touched == num_resident(memory) == 0
