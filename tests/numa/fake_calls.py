"""System calls that only record what they are asked for, or refuse it."""

import errno
from collections.abc import Collection

import numpy as np

from quire.numa.system_calls import (
    PAGE_BYTES,
    UNTRIED,
    Addresses,
    MemoryPolicy,
    Statuses,
)


class FakeCalls:
    """`LinuxCalls` of a machine whose pages lie where `where` says: address -> node. refused: the
    errno that every call on memory raises. stuck: addresses that can't be moved. ends_at: addresses
    at which a call to move ends. huge_pages: all pages of 2 MiB move together, and of each but the
    first of them the call says that they are busy."""

    def __init__(
        self, refused: int | None = None, policy: MemoryPolicy = MemoryPolicy.DEFAULT
    ) -> None:
        self.refused = refused
        self.policy = policy
        self.made: list[object] = []
        self.where: dict[int, int] = {}
        self.stuck: set[int] = set()
        self.ends_at: set[int] = set()
        self.huge_pages = False

    def thread_policy(self) -> int:
        self._check("get_mempolicy")
        return self.policy

    def set_thread_policy(self, policy: MemoryPolicy, nodes: Collection[int]) -> None:
        self._check("set_mempolicy")
        self.made.append((policy.name, tuple(nodes)))

    def set_range_policy(
        self, address: int, num_bytes: int, policy: MemoryPolicy, nodes: Collection[int]
    ) -> None:
        self._check("mbind")
        self.made.append((policy.name, tuple(nodes), address, num_bytes))

    def nodes_of(self, addresses: Addresses) -> Statuses:
        self._check("move_pages")
        found = [self.where.get(int(address), -errno.ENOENT) for address in addresses]
        return np.array(found, np.int32)

    def move(self, addresses: Addresses, nodes: Statuses) -> Statuses:
        self._check("move_pages")
        self.made.append(("move", len(addresses)))
        statuses = np.full(len(addresses), UNTRIED, np.int32)
        for index, (address, node) in enumerate(zip(addresses.tolist(), nodes, strict=True)):
            if address in self.ends_at:
                break
            statuses[index] = self._moved(address, int(node))
        return statuses

    def _moved(self, address: int, node: int) -> int:
        if address in self.stuck:
            return self.where[address]
        if self.huge_pages and self.where[address] == node:
            return -errno.EBUSY
        first = address >> 21 << 21
        together = range(first, first + (2 << 20), PAGE_BYTES) if self.huge_pages else [address]
        self.where |= {each: node for each in together if each in self.where}
        return node

    def _check(self, name: str) -> None:
        if self.refused is not None:
            raise OSError(self.refused, "refused", name)
