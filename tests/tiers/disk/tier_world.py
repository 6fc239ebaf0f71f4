"""A disk tier over a small pool, with a clock that a test moves."""

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
from tests.tiers.disk.faulty_files import FaultyFiles
from tests.tiers.disk.store_world import FINGERPRINT, name_of, payload_of

from quire.core.memory.tiers.contract import LoadOrder, StoreOrder
from quire.tiers.disk.disk_tier import DiskBudget, DiskTier
from quire.tiers.disk.files import Files
from quire.tiers.disk.folder import CacheFolder

STRIDE, SIZES = 4096, (4096, 1000)
"""Bytes of a block, and how many of them each group uses."""
NUM_BLOCKS = 64
PATIENCE_S = 60.0


class Clock:
    """Moves by itself only if it is told to."""

    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


class World:
    """Blocks are filled with what their names say before they are stored, and are checked after
    they were loaded; those that are not named stay as they are."""

    def __init__(
        self, path: Path, files: Files | None = None, budget: DiskBudget | None = None
    ) -> None:
        self.clock = Clock()
        self.storage = np.zeros((NUM_BLOCKS, STRIDE), np.uint8)
        self.woken = threading.Event()
        self.tier = DiskTier(
            CacheFolder.open(path, files or FaultyFiles()),
            FINGERPRINT,
            budget or DiskBudget(64 << 20),
            self.storage,
            SIZES,
            self.woken.set,
            self.clock,
        )
        self._next_id = 0
        self.ends: dict[int, bool] = {}

    def content(self, number: int, group: int = 0) -> bytes:
        return payload_of(name_of(number), SIZES[group], group)

    def store(self, numbers: Iterable[int], group: int = 0) -> list[int]:
        """Orders the blocks of these numbers to be kept. Returns the orders' ids."""
        orders = []
        for number in numbers:
            block = number % NUM_BLOCKS
            self.storage[block, : SIZES[group]] = np.frombuffer(
                self.content(number, group), np.uint8
            )
            orders.append(StoreOrder(self._take_id(), block, group, name_of(number)))
        self.tier.start(orders, ())
        return [order.order_id for order in orders]

    def load(self, numbers: Iterable[int], group: int = 0) -> list[int]:
        orders = [
            LoadOrder(self._take_id(), number % NUM_BLOCKS, group, name_of(number))
            for number in numbers
        ]
        for order in orders:
            self.storage[order.block] = 0xEE
        self.tier.start((), orders)
        return [order.order_id for order in orders]

    def wait(self, order_ids: Sequence[int]) -> list[bool]:
        """Until these have ended; how they did. An engine that is idle is woken up for each."""
        until_s = time.monotonic() + PATIENCE_S
        while not self.have_ended(order_ids):
            assert time.monotonic() < until_s, "an order has not ended"
            self.woken.wait(0.2)
        return [self.ends[order_id] for order_id in order_ids]

    def have_ended(self, order_ids: Sequence[int]) -> bool:
        self.woken.clear()
        for end in self.tier.ended():
            assert end.order_id not in self.ends, "each ends once"
            self.ends[end.order_id] = end.is_done
        return all(order_id in self.ends for order_id in order_ids)

    def has(self, numbers: Iterable[int], group: int = 0) -> bool:
        """Whether the blocks hold these contents, and nothing was written behind them."""
        return all(
            self.storage[number % NUM_BLOCKS, : SIZES[group]].tobytes()
            == self.content(number, group)
            and (self.storage[number % NUM_BLOCKS, SIZES[group] :] == 0xEE).all()
            for number in numbers
        )

    def _take_id(self) -> int:
        self._next_id += 1
        return self._next_id


def contents(*num_blocks: int) -> list[tuple[int, bytes]]:
    """So many of each group."""
    return [(group, name_of(at)) for group, count in enumerate(num_blocks) for at in range(count)]


def until(condition: Callable[[], object], what: str) -> None:
    """Wait until a function returns something true."""
    until_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < until_s, what
        time.sleep(0.001)
