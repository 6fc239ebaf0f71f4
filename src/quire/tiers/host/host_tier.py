"""The host tier: copies of a GPU's cached blocks in page-locked host memory.

It implements `Tiers` with the copies of `staged_copies`. It can be the only tier behind the pool,
or `stack.TierStack` puts the disk tier behind it. It has no threads: an order (to copy a block to
the host or back) is launched when it comes, and `ended` polls the device for finished copies.
`assembly` makes it.
"""

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

from quire.core.memory.tiers.contract import LoadOrder, MoveEnd, StoreOrder, Tail
from quire.tiers.host.slot_table import Key, SlotTable
from quire.tiers.host.staged_copies import Copy, StagedCopies

GUESSED_BYTES_PER_S = 10e9
"""Assumed bandwidth of loads until a load has been measured: less than that of PCIe 4.0 x16."""
LATENCY_S = 0.2e-3
"""Assumed latency of a load in seconds, including its launch."""
MEMORY_BYTES = 256 << 20
"""After this many further bytes, the weight of a measurement has fallen to 1 / e of its initial
value."""
POLL_S = 0.1e-3
"""Seconds between polls of the device while the engine waits."""


@dataclass(frozen=True, slots=True)
class HostTierCounters:
    """Counters since the start of the process, and some current values."""

    #: Bytes of page-locked memory, used or not.
    pinned_bytes: int
    #: Bytes of the contents that are stored now. A content is what a block holds for one KV group.
    used_bytes: int
    #: Number of contents that are stored now.
    num_records: int
    #: Number of loads that have succeeded.
    loads_done: int
    #: Number of loads that have failed.
    loads_failed: int
    loaded_bytes: int
    #: Seconds that load copies ran, without time in the queue.
    loaded_s: float
    #: Measured bandwidth of loads, as a moving average.
    bytes_per_s: float
    stores_done: int
    stores_failed: int
    stored_bytes: int
    #: Seconds that store copies ran, without time in the queue.
    stored_s: float
    #: Number of contents that were evicted to make room for others.
    evicted: int


class SlotLoad(NamedTuple):
    """A load order, with the slot that holds its content and is pinned for it."""

    order_id: int
    block: int
    slot: int


class _SlotStore(NamedTuple):
    """A store order and its slot."""

    order: StoreOrder
    slot: int


@dataclass(eq=False, slots=True)
class _SlotStores:
    """Stores that are copied together."""

    copy: Copy
    stores: list[_SlotStore]
    #: True if the tier was cleared after these stores began.
    is_forgotten: bool = False


@dataclass(eq=False, slots=True)
class _SlotLoads:
    """Loads that are copied together."""

    copy: Copy
    loads: list[SlotLoad]


class HostTier:
    """The host tier, called from the engine's thread only. No call except `close` and `wait` waits
    for the device.

    Invariant: `ended` reports each accepted order exactly once. Each store or load in flight holds
    one pin on its slot; `TierStack` may hold further pins.
    """

    def __init__(self, copies: StagedCopies, clock: Callable[[], float] = time.monotonic) -> None:
        """`copies` is closed by `close`."""
        self.copies = copies
        self.block_bytes = int(copies.slots.shape[1])
        self.table = SlotTable(len(copies.slots))
        # Contents stored since `TierStack` last emptied this list; None without a disk tier.
        self.new_contents: list[Key] | None = None
        self._clock = clock
        self._stores: list[_SlotStores] = []
        self._loads: list[_SlotLoads] = []
        self._ended: list[MoveEnd] = []
        self._storing: set[Key] = set()
        self._is_closed = False
        #: Total bytes of the loads in flight.
        self._num_bytes_ahead = 0
        self._slowness = 1.0 / GUESSED_BYTES_PER_S
        self._num_loads_done = self._num_loads_failed = 0
        self._num_stores_done = self._num_stores_failed = 0
        self._loaded_s = self._stored_s = 0.0

    # ---- the contract ------------------------------------------------------------------------

    def find(self, group: int, name: bytes) -> bool:
        return self.table.find((group, name)) is not None

    def tails(self, parent: bytes) -> Sequence[Tail]:
        return self.table.tails(parent)

    def start(self, stores: Sequence[StoreOrder], loads: Sequence[LoadOrder]) -> None:
        found: list[SlotLoad] = []
        for order in loads:
            slot = self.table.find((order.group, order.name))
            if slot is None or self._is_closed:
                self._num_loads_failed += 1
                self._ended.append(MoveEnd(order.order_id, False))
                continue
            self.table.pin(slot)
            found.append(SlotLoad(order.order_id, order.block, slot))
        self.load(found)
        self._store(stores)

    def cancel(self, order_ids: Iterable[int]) -> None:
        """Does nothing, since all orders are already in flight and end soon."""

    def ended(self) -> list[MoveEnd]:
        self._finish_copies()
        ended, self._ended = self._ended, []
        return ended

    def load_s(self, contents: Sequence[tuple[int, bytes]]) -> float:
        if self._is_closed or not all([self.find(*content) for content in contents]):
            return math.inf
        num_bytes = self._num_bytes_ahead + len(contents) * self.block_bytes
        return LATENCY_S + num_bytes * self._slowness

    @property
    def takes_stores(self) -> bool:
        return not self._is_closed and self.table.num_takeable > 0

    def wait(self, timeout_s: float) -> None:
        until_s = self._clock() + timeout_s
        while not self.has_ended and self._clock() < until_s:
            time.sleep(POLL_S)

    def clear(self) -> None:
        self.table.forget_all()
        if self.new_contents is not None:
            self.new_contents = []
        for batch in self._stores:
            batch.is_forgotten = True

    def close(self) -> None:
        """Wait for the copies in flight and free the memory. Later orders fail."""
        self._is_closed = True
        self.copies.close()

    def counts(self) -> dict[str, dict[str, float]]:
        """{"host": `counters` as a dict}."""
        return {"host": asdict(self.counters())}

    # ---- for a tier behind it ----------------------------------------------------------------

    @property
    def num_in_flight(self) -> int:
        """Number of batches of copies in flight."""
        return len(self._stores) + len(self._loads)

    @property
    def has_ended(self) -> bool:
        """True if `ended` would return any order. Polls the device first."""
        self._finish_copies()
        return bool(self._ended)

    def load(self, loads: Sequence[SlotLoad]) -> None:
        """Copy contents from their slots to blocks. The caller has pinned each slot for its load;
        the pin is removed when the copy ends."""
        if not loads:
            return
        self._num_bytes_ahead += len(loads) * self.block_bytes
        copy = self.copies.load([each.slot for each in loads], [each.block for each in loads])
        self._loads.append(_SlotLoads(copy, list(loads)))

    def counters(self) -> HostTierCounters:
        size = self.block_bytes
        return HostTierCounters(
            pinned_bytes=self.copies.pinned_bytes,
            used_bytes=len(self.table) * size,
            num_records=len(self.table),
            loads_done=self._num_loads_done,
            loads_failed=self._num_loads_failed,
            loaded_bytes=self._num_loads_done * size,
            loaded_s=self._loaded_s,
            bytes_per_s=1.0 / self._slowness,
            stores_done=self._num_stores_done,
            stores_failed=self._num_stores_failed,
            stored_bytes=self._num_stores_done * size,
            stored_s=self._stored_s,
            evicted=self.table.num_evicted,
        )

    # ---- parts -------------------------------------------------------------------------------

    def _store(self, orders: Sequence[StoreOrder]) -> None:
        """Acquire a slot for each new content, and copy its block there."""
        stores: list[_SlotStore] = []
        for order in orders:
            key = order.group, order.name
            if self.table.find(key) is not None:
                self._num_stores_done += 1
                self._ended.append(MoveEnd(order.order_id, True))
                continue
            slot = None if self._is_closed or key in self._storing else self.table.acquire()
            if slot is None:
                self._num_stores_failed += 1
                self._ended.append(MoveEnd(order.order_id, False))
                continue
            self._storing.add(key)
            stores.append(_SlotStore(order, slot))
        if stores:
            blocks = [order.block for order, _ in stores]
            copy = self.copies.store(blocks, [slot for _, slot in stores])
            self._stores.append(_SlotStores(copy, stores))

    def _finish_copies(self) -> None:
        """Handle all copies that have ended. Loads and stores end independently of each other."""
        if self._loads:
            over = [batch for batch in self._loads if batch.copy.is_over()]
            self._loads = [batch for batch in self._loads if batch not in over]
            for batch in over:
                self._end_loads(batch)
        if self._stores:
            stored = [each for each in self._stores if each.copy.is_over()]
            self._stores = [each for each in self._stores if each not in stored]
            for each in stored:
                self._end_stores(each)

    def _end_loads(self, batch: _SlotLoads) -> None:
        num_bytes = len(batch.loads) * self.block_bytes
        seconds = max(batch.copy.seconds, 1e-7)
        weight = 1.0 - math.exp(-num_bytes / MEMORY_BYTES)
        self._slowness += weight * (seconds / num_bytes - self._slowness)
        self._num_bytes_ahead -= num_bytes
        self._num_loads_done += len(batch.loads)
        self._loaded_s += seconds
        for load in batch.loads:
            self.table.unpin(load.slot)
            self._ended.append(MoveEnd(load.order_id, True))

    def _end_stores(self, batch: _SlotStores) -> None:
        self._stored_s += batch.copy.seconds
        for order, slot in batch.stores:
            key = order.group, order.name
            self._storing.discard(key)
            is_kept = not batch.is_forgotten and self.table.record_content(
                slot, key, order.parent, order.tokens
            )
            self.table.unpin(slot)
            self._num_stores_done += is_kept
            self._num_stores_failed += not is_kept
            if is_kept and self.new_contents is not None:
                self.new_contents.append(key)
            self._ended.append(MoveEnd(order.order_id, is_kept))
