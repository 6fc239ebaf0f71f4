"""Linux's system calls on memory policies and pages, called through ctypes.

The C library has no functions for these calls, and libnuma may not be installed. Each call raises
OSError with the system's errno: EPERM or ENOSYS if a container's filter forbids it. Called by
`binding` and `stragglers`; tests replace them. See man 2 set_mempolicy, mbind, move_pages.
"""

import ctypes
import errno
import os
import platform
from collections.abc import Collection
from enum import IntEnum
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:  # the API server imports this module, and starts sooner without numpy
    import numpy as np
    from numpy.typing import NDArray

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
MPOL_MF_MOVE = 2
"""Flag of move_pages: move pages that only this process uses."""

_NUMBERS = {
    # mbind, set_mempolicy, get_mempolicy, move_pages
    "x86_64": (237, 238, 239, 279),
    "aarch64": (235, 237, 236, 239),
    "riscv64": (235, 237, 236, 239),
    "ppc64le": (259, 261, 260, 301),
    "s390x": (268, 270, 269, 310),
}
_WORD_BITS = 64

UNTRIED = -errno.EAGAIN
"""The status of a page that the system call did not reach."""

Addresses: TypeAlias = "NDArray[np.uint64]"
Statuses: TypeAlias = "NDArray[np.int32]"


class MemoryPolicy(IntEnum):
    """A policy that chooses the nodes of new pages. The values are Linux's."""

    #: The node of the CPU that first writes the page.
    DEFAULT = 0
    #: The given node, or others if it is full.
    PREFERRED = 1
    #: Only the given nodes.
    BIND = 2
    #: The given nodes in turn.
    INTERLEAVE = 3


class LinuxCalls:
    """Calls the system. Each method raises OSError."""

    def __init__(self) -> None:
        self._syscall: Any = ctypes.CDLL(None, use_errno=True).syscall
        self._syscall.restype = ctypes.c_long
        numbers = _NUMBERS.get(platform.machine(), (-1,) * 4)  # -1 is ENOSYS
        self._mbind, self._set_mempolicy, self._get_mempolicy, self._move_pages = numbers

    def thread_policy(self) -> int:
        """Linux's number of the calling thread's policy. `MemoryPolicy` may lack this number."""
        mode = ctypes.c_int()
        self._call("get_mempolicy", self._get_mempolicy, ctypes.byref(mode), None, 0, None, 0)
        return mode.value & 0xFF  # without its flags

    def set_thread_policy(self, policy: MemoryPolicy, nodes: Collection[int]) -> None:
        """Set the policy of the calling thread and of threads that it starts from now on."""
        mask, num_bits = _mask(nodes)
        self._call("set_mempolicy", self._set_mempolicy, int(policy), mask, num_bits)

    def set_range_policy(
        self, address: int, num_bytes: int, policy: MemoryPolicy, nodes: Collection[int]
    ) -> None:
        """Set the policy of the pages that lie fully in a range, whichever thread writes them.

        Pages that are already present stay on their nodes.
        """
        begin = -(-address // PAGE_BYTES) * PAGE_BYTES
        end = (address + num_bytes) // PAGE_BYTES * PAGE_BYTES
        if begin < end:
            mask, num_bits = _mask(nodes)
            self._call("mbind", self._mbind, begin, end - begin, int(policy), mask, num_bits, 0)

    def nodes_of(self, addresses: Addresses) -> Statuses:
        """The nodes [N] of pages of this process at addresses [N].

        A negative value is minus an errno; ENOENT means that the page is not present.
        """
        return self._pages(addresses, None, 0)

    def move(self, addresses: Addresses, nodes: Statuses) -> Statuses:
        """Move pages [N] to nodes [N]. Returns each page's node [N], as `nodes_of` does.

        The call ends at the first page that can't be moved now. This and all later pages get
        UNTRIED.
        """
        return self._pages(addresses, nodes, MPOL_MF_MOVE)

    def _pages(self, addresses: Addresses, nodes: "Statuses | None", flags: int) -> Statuses:
        import numpy as np  # only the engine's process calls it

        pages = np.ascontiguousarray(addresses, np.uint64)
        targets = None if nodes is None else np.ascontiguousarray(nodes, np.int32)
        statuses = np.full(len(pages), UNTRIED, np.int32)
        pointers = (pages, targets, statuses)
        arguments = [None if each is None else each.ctypes.data for each in pointers]
        self._call("move_pages", self._move_pages, 0, len(pages), *arguments, flags)
        return statuses

    def _call(self, name: str, number: int, *arguments: Any) -> None:
        words = [
            ctypes.c_long(each) if isinstance(each, int) else each  # ctypes cuts ints to 32 bits
            for each in arguments
        ]
        if self._syscall(ctypes.c_long(number), *words) < 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), name)


def _mask(nodes: Collection[int]) -> tuple[Any, int]:
    """The bit mask of nodes, and its length plus one, as Linux's calls expect it."""
    if not nodes:
        return None, 0
    num_words = max(nodes) // _WORD_BITS + 1
    words = [0] * num_words
    for node in nodes:
        words[node // _WORD_BITS] |= 1 << node % _WORD_BITS
    return (ctypes.c_uint64 * num_words)(*words), num_words * _WORD_BITS + 1
