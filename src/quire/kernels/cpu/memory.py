"""Allocates memory for weights and KV, in huge pages if possible, and prefaults it.

Much of this memory is read at every step, so it should have few pages. With pages of 4 KiB a thread
reads 16 to 18 GB/s, with huge pages 26 to 29 GB/s (AMD EPYC).
"""

import ctypes
import mmap
import sys
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress

import numpy as np
import torch

from quire.observability.log import get_logger

HUGE_PAGE_BYTES = 2 << 20

_LINE_BYTES = 64
TOUCHED_BYTES = 4 << 20
"""The number of bytes that `FirstTouch` prefaults by one call, so few that `stop` waits only
briefly."""
POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE, which Python does not name. It makes pages writable and keeps their content.
Linux has it since 5.14."""
SLEEP_S = 0.1

logger = get_logger(__name__)


def allocate(num_bytes: int) -> torch.Tensor:
    """Zeros, uint8 [num_bytes], that take no memory until they are written.

    Tensors of at least HUGE_PAGE_BYTES begin at a multiple of that size. The system is advised to
    use huge pages, except for the last part if it fills no whole page, and may ignore the advice.
    """
    if num_bytes < HUGE_PAGE_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        # numpy's zeros take no memory until they are written. torch would write them, by one
        # thread.
        room = torch.from_numpy(np.zeros(num_bytes + _LINE_BYTES, dtype=np.uint8))
        start = -room.data_ptr() % _LINE_BYTES
        return room[start : start + num_bytes]
    # The mapping is private, because shared anonymous memory is a file, without huge pages.
    memory = mmap.mmap(-1, num_bytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    offset = -address % HUGE_PAGE_BYTES
    with suppress(OSError):  # raised by a kernel that was built without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE, offset, num_bytes // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES)
    return torch.frombuffer(memory, dtype=torch.uint8, count=num_bytes, offset=offset)


def release_pages(tensor: torch.Tensor) -> None:
    """Release the memory of a contiguous tensor from `allocate`, which keeps its addresses.

    On Linux its whole pages become zeros, which take memory again when they are written. On other
    systems nothing happens.
    """
    if not hasattr(mmap, "MADV_DONTNEED") or not sys.platform.startswith("linux"):
        return
    size = mmap.PAGESIZE
    first = -(-tensor.data_ptr() // size) * size
    end = (tensor.data_ptr() + tensor.nbytes) // size * size
    if first < end:
        libc = ctypes.CDLL(None, use_errno=True)
        address, length = ctypes.c_void_p(first), ctypes.c_size_t(end - first)
        if libc.madvise(address, length, mmap.MADV_DONTNEED) != 0:
            raise OSError(ctypes.get_errno(), "madvise failed")


class FirstTouch:
    """A thread that prefaults a tensor's memory, from its start.

    The system provides and clears new memory when it is first written. In a virtual machine this
    may be slower than reading a disk, since the host must find the memory: 0.65 GB/s instead of
    3 GB/s (AMD EPYC, November 2026). Prefaulting keeps bytes that other threads write at the same
    time. If the system can't prefault, nothing happens. The thread ends when the tensor is freed.
    """

    def __init__(self, tensor: torch.Tensor, num_bytes: int, may_go_on: Callable[[], bool]) -> None:
        """Prefault the first `num_bytes` of a contiguous tensor.

        The thread calls `may_go_on` before each part, and waits while it returns False.
        """
        self.num_bytes_touched = 0
        self._tensor = weakref.ref(tensor)
        end = tensor.data_ptr() + min(num_bytes, tensor.nbytes)
        self._address = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        self._num_bytes = max(0, (end - self._address) // mmap.PAGESIZE * mmap.PAGESIZE)
        self._may_go_on = may_go_on
        self._is_stopped = False
        self._thread = threading.Thread(target=self._touch_all, name="quire-touch", daemon=True)
        if sys.platform.startswith("linux"):
            with suppress(RuntimeError):  # if no thread can be started, nothing is prefaulted
                self._thread.start()

    def stop(self) -> None:
        """Stop after the current part, and wait for it."""
        self._is_stopped = True
        if self._thread.is_alive():
            self._thread.join()

    def _touch_all(self) -> None:
        while self.num_bytes_touched < self._num_bytes and not self._is_stopped:
            if self._may_go_on():
                tensor = self._tensor()  # keeps the tensor alive during the call
                if tensor is None or not self._touch_part():
                    return
                del tensor
            else:
                time.sleep(SLEEP_S)

    def _touch_part(self) -> bool:
        begin = ctypes.c_void_p(self._address + self.num_bytes_touched)
        size = min(TOUCHED_BYTES, self._num_bytes - self.num_bytes_touched)
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.madvise(begin, ctypes.c_size_t(size), POPULATE_WRITE) != 0:
            logger.debug("memory can't be prefaulted: errno %d", ctypes.get_errno())
            return False
        self.num_bytes_touched += size
        return True
