"""System calls that only record what they are asked for, or refuse it."""

import errno
from collections.abc import Collection

import numpy as np

from quire.numa.system_calls import Addresses, MemoryPolicy, Statuses


class FakeCalls:
    """`NumaCalls` of a machine whose pages lie where `where` says: address -> node. refused: the
    errno that every call on memory raises. stuck: addresses that can't be moved."""

    def __init__(
        self, refused: int | None = None, policy: MemoryPolicy = MemoryPolicy.DEFAULT
    ) -> None:
        self.refused = refused
        self.policy = policy
        self.made: list[object] = []
        self.where: dict[int, int] = {}
        self.stuck: set[int] = set()

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
        self.made.append(("move", len(addresses)))
        for address, node in zip(addresses, nodes, strict=True):
            if int(address) not in self.stuck:
                self.where[int(address)] = int(node)
        return self.nodes_of(addresses)

    def _check(self, name: str) -> None:
        if self.refused is not None:
            raise OSError(self.refused, "refused", name)
