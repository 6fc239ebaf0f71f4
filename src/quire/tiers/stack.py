"""Combines the host tier and the disk tier behind it into one tier for a GPU.

A slot is a block of page-locked host memory. The disk tier reads and writes slots in place of the
GPU pool's blocks. So a content (what a block holds for one KV group) passes through a slot on its
way to the disk and back.

    store   block -> slot     ends the order, so the block can be reused early
            slot  -> disk     later; the slot is pinned until it is written
    load    slot  -> block    for contents in host memory
            disk  -> slot -> block    for the rest, which stay in their slots until evicted

So the host tier is both a tier and the staging area of the disk. If a content can't be written now
(the disk is paused, its queue is full, or the daily limit of written bytes is reached), it is
written later, if it is still in host memory.
"""

import math
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import count
from typing import NamedTuple

from quire.core.memory.tiers.contract import LoadOrder, MoveEnd, StoreOrder, Tail
from quire.tiers.disk.disk_tier import DiskTier
from quire.tiers.host.host_tier import HostTier, SlotLoad
from quire.tiers.host.slot_table import Key

WRITING_SHARE = 1 / 2
"""Largest share of the slots that disk writes may pin; the rest stays available to loads."""
WAIT_S = 0.5e-3
"""Longest wait for one tier, in seconds, before the other tier is checked."""
CLOSE_S = 10.0


class _Reading(NamedTuple):
    """A load order whose content the disk tier is reading."""

    order: LoadOrder
    slot: int
    #: `TierStack._era` when the disk read was started.
    era: int


class _Writing(NamedTuple):
    """A content that the disk tier is writing from a slot."""

    key: Key
    slot: int
    era: int


@dataclass(slots=True)
class StackCounters:
    """Counts of contents in host memory that have not been written to the disk."""

    #: Number of contents that wait to be written to the disk.
    num_behind: int = 0
    #: Number of contents that were evicted from host memory before they were written.
    num_lost: int = 0


class TierStack:
    """The two tiers as one; implements `core.memory.tiers.contract.Tiers`. Only `close` and `wait`
    block.

    Invariant: each disk read or write in flight holds one pin on its slot. Each accepted order is
    in exactly one of `_queued`, `_reading`, the host tier, and `_ended`.
    """

    def __init__(
        self, host: HostTier, disk: DiskTier, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`disk` must use `host.copies.slots` as its storage. `close` closes both tiers."""
        self.host, self.disk = host, disk
        host.new_contents = []
        self._clock = clock
        self._num_lost = 0
        self._numbers = count()  # ids of orders to the disk; the block pool has its own ids
        #: Number of calls of `clear` so far. A content whose read began before the last `clear` is
        #: not kept in its slot.
        self._era = 0
        self._reads_disk = True
        self._ended: list[MoveEnd] = []
        self._queued: deque[LoadOrder] = deque()  # loads without a slot
        self._reading: dict[int, _Reading] = {}
        self._read_number: dict[int, int] = {}  # id of the pool's order -> id of the disk order
        #: Contents in host memory that have to be written to the disk, oldest first.
        self._behind: OrderedDict[Key, None] = OrderedDict()
        self._writing: dict[int, _Writing] = {}
        self._most_writing = max(1, int(host.table.num_slots * WRITING_SHARE))

    def find(self, group: int, name: bytes) -> bool:
        """True if a content is present. While the disk can't be read, contents that are only on
        disk count as absent; otherwise a prefix that is mostly in host memory would not be loaded
        at all."""
        return self.host.find(group, name) or (self._reads_disk and self.disk.find(group, name))

    def tails(self, parent: bytes) -> Sequence[Tail]:
        tails = self.host.tails(parent)
        more = self.disk.tails(parent) if self._reads_disk else ()
        return list(dict.fromkeys([*tails, *more])) if more else tails

    def start(self, stores: Sequence[StoreOrder], loads: Sequence[LoadOrder]) -> None:
        in_host: list[LoadOrder] = []
        for order in loads:
            if self.host.find(order.group, order.name):
                in_host.append(order)
            else:
                self._queued.append(order)
        # Pin the contents that are in host memory first, since acquiring slots for disk reads may
        # evict contents.
        self.host.start((), in_host)
        self._read_more()
        self.host.start(stores, ())

    def cancel(self, order_ids: Iterable[int]) -> None:
        cancelled = set(order_ids)
        self._ended += [
            MoveEnd(order.order_id, False) for order in self._queued if order.order_id in cancelled
        ]
        self._queued = deque(each for each in self._queued if each.order_id not in cancelled)
        numbers = self._read_number
        self.disk.cancel([numbers[each] for each in cancelled if each in numbers])

    def ended(self) -> list[MoveEnd]:
        self._pass_on_orders()
        ended, self._ended = self._ended, []
        return ended

    def load_s(self, contents: Sequence[tuple[int, bytes]]) -> float:
        """Predicted seconds: the sum of both tiers' times. The last batch from the disk crosses the
        bus only after everything has been read, and the bus is nearly idle until then."""
        there = [content for content in contents if self.host.find(*content)]
        seconds = self.host.load_s(there)
        if len(there) < len(contents):
            rest = [content for content in contents if not self.host.find(*content)]
            if not all([self.disk.find(*content) for content in rest]):
                return math.inf
            seconds += self.disk.load_s(rest)
        return seconds

    @property
    def takes_stores(self) -> bool:
        return self.host.takes_stores

    def wait(self, timeout_s: float) -> None:
        until_s = self._clock() + timeout_s
        while True:
            self._pass_on_orders()
            left_s = until_s - self._clock()
            if self._ended or left_s <= 0.0:
                return
            waiting = self.host.wait if self.host.num_in_flight else self.disk.wait
            waiting(min(left_s, WAIT_S))

    def counts(self) -> Mapping[str, Mapping[str, float]]:
        behind = StackCounters(len(self._behind) + len(self._writing), self._num_lost)
        host = self.host.counts()["host"]
        waiting_bytes = behind.num_behind * self.host.block_bytes
        disk = self.disk.counts()["disk"]
        disk["queued_bytes"] = max(disk["queued_bytes"], waiting_bytes)
        return {"host": host | asdict(behind), "disk": disk}

    def clear(self) -> None:
        self._era += 1
        self._behind.clear()
        self.host.clear()
        self.disk.clear()

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Write contents that are only in host memory until `timeout_s` has passed, then close both
        tiers."""
        until_s = self._clock() + timeout_s
        self._ended += [MoveEnd(order.order_id, False) for order in self._queued]
        self._queued.clear()
        while self._clock() < until_s:
            self._pass_on_orders()
            if not self.host.num_in_flight and not (self._behind and self.disk.takes_stores):
                break
            waiting = self.host.wait if self.host.num_in_flight else self.disk.wait
            waiting(WAIT_S)
        self.disk.close(max(until_s - self._clock(), 1.0))
        self._pass_on_orders()
        self.host.close()

    # ---- parts -------------------------------------------------------------------------------

    def _pass_on_orders(self) -> None:
        """Handle the ended orders of both tiers, and start their next orders."""
        came: list[SlotLoad] = []
        for end in self.disk.ended():
            if end.order_id in self._writing:
                self._has_gone(self._writing.pop(end.order_id), is_done=end.is_done)
                continue
            reading = self._reading.pop(end.order_id)
            if (load := self._has_come(reading, is_done=end.is_done)) is not None:
                came.append(load)
        self.host.load(came)
        self._ended += self.host.ended()
        self._reads_disk = self.disk.load_s(()) < math.inf
        self._read_more()
        self._write_more()

    def _has_come(self, reading: _Reading, *, is_done: bool) -> SlotLoad | None:
        """Handle the end of a disk read into a slot. Returns the load from that slot to its block,
        or None if the read failed."""
        order, slot, era = reading
        del self._read_number[order.order_id]
        table, key = self.host.table, (order.group, order.name)
        if not is_done:
            table.unpin(slot)
            self._ended.append(MoveEnd(order.order_id, False))
            return None
        if era == self._era:
            table.record_content(slot, key)
        return SlotLoad(order.order_id, order.block, slot)

    def _has_gone(self, writing: _Writing, *, is_done: bool) -> None:
        """Handle the end of a write to the disk. If it failed because the disk is paused, queue the
        content again."""
        key, slot, era = writing
        self.host.table.unpin(slot)
        if not is_done and era == self._era and not self.disk.takes_stores:
            self._behind[key] = None

    def _read_more(self) -> None:
        """Start queued disk reads while slots are available."""
        orders: list[LoadOrder] = []
        table = self.host.table
        while self._queued and table.num_takeable:
            order = self._queued.popleft()
            if not self.disk.find(order.group, order.name):
                self._ended.append(MoveEnd(order.order_id, False))
                continue
            slot = table.acquire()
            assert slot is not None, "num_takeable > 0, but there is no slot"
            number = next(self._numbers)
            self._reading[number] = _Reading(order, slot, self._era)
            self._read_number[order.order_id] = number
            orders.append(LoadOrder(number, slot, order.group, order.name))
        if orders:
            self.disk.start((), orders)

    def _write_more(self) -> None:
        """Start disk writes of contents that are only in host memory, while the disk accepts
        stores."""
        new_contents, self.host.new_contents = self.host.new_contents, []
        self._behind |= dict.fromkeys(new_contents or ())
        table = self.host.table
        while self._behind and len(self._writing) < self._most_writing and self.disk.takes_stores:
            key, _ = self._behind.popitem(last=False)
            slot = table.find(key)
            self._num_lost += slot is None
            if slot is None or self.disk.find(*key):
                continue
            table.pin(slot)
            number = next(self._numbers)
            self._writing[number] = _Writing(key, slot, self._era)
            self.disk.start([StoreOrder(number, slot, *key, *table.tail_parts(key))], ())
