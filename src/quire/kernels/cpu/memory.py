"""Allocates memory for weights and KV, in huge pages if possible.

Much of it is read at every step, so it should lie in as few pages as possible. With pages of 4 KiB
one thread reads 16 to 18 GB/s, with huge ones 26 to 29 (AMD EPYC). Knows no layout. Called where
weights are packed, and for the KV cache.
"""

import ctypes
import mmap
import sys
from contextlib import suppress

import torch

HUGE_PAGE_BYTES = 2 << 20


def allocate(num_bytes: int) -> torch.Tensor:
    """Zeros, uint8 [num_bytes], that take no memory until they are written.

    From HUGE_PAGE_BYTES on they begin at a multiple of that, and the system is advised to use huge
    pages for all of them but the last part of one, which would else be there beyond the end. It may
    have none: the advice is only that.
    """
    if num_bytes < HUGE_PAGE_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.zeros(num_bytes, dtype=torch.uint8)
    # Private: shared anonymous memory is a file to the system, which has no huge pages.
    memory = mmap.mmap(-1, num_bytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
    offset = -address % HUGE_PAGE_BYTES
    with suppress(OSError):  # raised by a kernel that was built without huge pages
        memory.madvise(mmap.MADV_HUGEPAGE, offset, num_bytes // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES)
    return torch.frombuffer(memory, dtype=torch.uint8, count=num_bytes, offset=offset)


def give_back(tensor: torch.Tensor) -> None:
    """Give the memory of a contiguous tensor back to the system; addresses stay as they are.

    On Linux its whole pages are zeros afterwards, which take memory again when they are written.
    Elsewhere nothing happens. The tensor must be memory that `allocate` returned.
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
