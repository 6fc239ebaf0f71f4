"""The host tier in front of the disk tier, as one: for a GPU.

The disk tier works on the host's slots as it would on a pool's blocks: what it writes is copied to
a slot first, what it reads goes through one.

    store   block -> slot     the order ends here, so the block is given back early
            slot  -> disk     behind it; the slot is pinned meanwhile
    load    slot  -> block    of what the host has
            disk  -> slot -> block    of the rest; it stays in the slot as long as there is room

So the host tier is both a tier and the staging area of the disk. What can't be written now (the
disk pauses, its queue is full, the day's bytes are used) is written later, if it is still in the
host then.
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
"""Of the slots, at most so many are pinned by writes: loads need some."""
WAIT_S = 0.5e-3
"""How long one of the two tiers is waited for before the other is asked."""
CLOSE_S = 10.0


class _Reading(NamedTuple):
    """A load that the disk has in hand. era: in which it was ordered, see `TierStack`."""

    order: LoadOrder
    slot: int
    era: int


class _Writing(NamedTuple):
    """A content that the disk writes out of a slot."""

    key: Key
    slot: int
    era: int


@dataclass(slots=True)
class StackCounters:
    """num_behind: contents that wait to be written to the disk. num_lost: those that made room in
    the host before they could be."""

    num_behind: int = 0
    num_lost: int = 0


class TierStack:
    """See `core.memory.tiers.contract.Tiers`; as `DiskTier` it never waits but in `close`.

    Invariant: of each read and write that the disk has in hand, its slot has one pin. Each order
    that was taken in is in exactly one of `_queued`, `_reading`, the host tier, and `_ended`.
    """

    def __init__(
        self, host: HostTier, disk: DiskTier, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """disk: over `host.copies.slots`. Both are closed by `close`."""
        self.host, self.disk = host, disk
        host.new_contents = []
        self._clock = clock
        self._num_lost = 0
        self._numbers = count()  # of the orders to the disk, apart from the memory's
        self._era = 0  # a content of an earlier one was cleared
        self._reads_disk = True
        self._ended: list[MoveEnd] = []
        self._queued: deque[LoadOrder] = deque()  # no slot yet
        self._reading: dict[int, _Reading] = {}
        self._read_number: dict[int, int] = {}  # by the memory's order
        self._behind: OrderedDict[Key, None] = OrderedDict()
        self._writing: dict[int, _Writing] = {}
        self._most_writing = max(1, int(host.table.num_slots * WRITING_SHARE))

    def find(self, group: int, name: bytes) -> bool:
        """What only the disk has is not there while it can't be read: else a prefix of which the
        host has most would not be loaded at all."""
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
        # Pinned before the reads take slots, which evict.
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
        self._go_on()
        ended, self._ended = self._ended, []
        return ended

    def load_s(self, contents: Sequence[tuple[int, bytes]]) -> float:
        """The sum of both tiers' times: of what the disk brings, the last batch crosses the bus
        when all has been read, and until then the bus is nearly idle."""
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
            self._go_on()
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
        """Write what the host has and the disk has not, as far as it goes in timeout_s."""
        until_s = self._clock() + timeout_s
        self._ended += [MoveEnd(order.order_id, False) for order in self._queued]
        self._queued.clear()
        while self._clock() < until_s:
            self._go_on()
            if not self.host.num_in_flight and not (self._behind and self.disk.takes_stores):
                break
            waiting = self.host.wait if self.host.num_in_flight else self.disk.wait
            waiting(WAIT_S)
        self.disk.close(max(until_s - self._clock(), 1.0))
        self._go_on()
        self.host.close()

    # ---- parts -------------------------------------------------------------------------------

    def _go_on(self) -> None:
        """Take in what both tiers have ended, and give each what comes next."""
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
        """The disk has filled a slot, or has not."""
        order, slot, era = reading
        del self._read_number[order.order_id]
        table, key = self.host.table, (order.group, order.name)
        if not is_done:
            table.unpin(slot)
            self._ended.append(MoveEnd(order.order_id, False))
            return None
        if era == self._era:
            table.fill(slot, key)
        return SlotLoad(order.order_id, order.block, slot)

    def _has_gone(self, writing: _Writing, *, is_done: bool) -> None:
        """The disk has written a content, or has not; if it pauses, it is asked again."""
        key, slot, era = writing
        self.host.table.unpin(slot)
        if not is_done and era == self._era and not self.disk.takes_stores:
            self._behind[key] = None

    def _read_more(self) -> None:
        """Of what is queued, as much as there are slots for."""
        orders: list[LoadOrder] = []
        table = self.host.table
        while self._queued and table.num_takeable:
            order = self._queued.popleft()
            if not self.disk.find(order.group, order.name):
                self._ended.append(MoveEnd(order.order_id, False))
                continue
            slot = table.take()
            assert slot is not None, "a slot that could be taken is not there"
            number = next(self._numbers)
            self._reading[number] = _Reading(order, slot, self._era)
            self._read_number[order.order_id] = number
            orders.append(LoadOrder(number, slot, order.group, order.name))
        if orders:
            self.disk.start((), orders)

    def _write_more(self) -> None:
        """Of what is only in the host, as much as the disk takes."""
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
