"""The disk tier on a virtual clock: moves take measured times, and no bytes are stored.

It remembers which contents the disk tier would hold, in the same segments, index and daily limit of
writes, and evicts segments as `tiers.disk.store.SegmentStore` does. Reads and writes have one queue
each. `virtual_engine` puts it behind the block pool. Failures, hung reads and other programs on the
disk are not simulated; `fakes.fake_tiers` has those.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

from quire.core.kv_groups import KVGroup
from quire.core.memory.tiers.contract import LoadOrder, MoveEnd, StoreOrder, Tail
from quire.tiers.disk.disk_tier import MIN_QUEUED_BYTES, QUEUED_SHARE
from quire.tiers.disk.io_limits import DayBudget, IoPace
from quire.tiers.disk.load_rate import LoadSpeed
from quire.tiers.disk.record import Record, record_bytes
from quire.tiers.disk.record_index import Key, RecordIndex
from quire.tiers.disk.segment import DESCRIPTOR_BYTES, TRAILER_BYTES
from quire.tiers.disk.store import REWRITTEN_SHARE, needed_bytes, segment_bytes_for

_NO_DIGEST = bytes(16)
#: Bytes of a segment without records.
_SEGMENT_BYTES = DESCRIPTOR_BYTES + TRAILER_BYTES


class DiskSpeeds(NamedTuple):
    """The speeds of a disk tier."""

    #: The speed of loads while the engine runs no step.
    alone: LoadSpeed
    #: The speed of loads while steps run.
    beside: LoadSpeed
    #: The seconds that a store takes for each of its bytes.
    store_s_per_byte: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskShape:
    """The sizes and speeds of a simulated disk tier, which begins empty."""

    speeds: DiskSpeeds
    #: The bytes that the cache folder may hold.
    num_bytes: int
    #: The bytes that may be written in 24 hours; None means no limit.
    bytes_a_day: int | None = None


class KeptSegments:
    """The records that a `SegmentStore` of the same budget would hold after the same calls.

    Invariant: `_bytes` has the bytes of the segments in `_keys`, headers and footers included. The
    last segment is open, the others are sealed.
    """

    def __init__(
        self, budget_bytes: int, segment_bytes: int, may_rewrite: Callable[[int], bool]
    ) -> None:
        """`may_rewrite` is called with a record's bytes, and returns whether it may be written
        again when its segment is evicted."""
        self.index = RecordIndex()
        self._budget_bytes, self._segment_bytes = budget_bytes, segment_bytes
        self._may_rewrite = may_rewrite
        self._numbers = count(1)
        self._keys: dict[int, list[Key]] = {}  # of each segment by number, the oldest first
        self._bytes: dict[int, int] = {}

    def append(self, record: Record) -> None:
        """Write a record that is not stored yet, and evict the oldest segments if need be."""
        needed = needed_bytes(record)
        most = self._budget_bytes - needed - _SEGMENT_BYTES
        while self._keys and sum(self._bytes.values()) > most:
            self._evict(next(iter(self._keys)))
        self._append(record, needed)

    def clear(self) -> None:
        """Remove all records."""
        self.index.forget_all()
        self._keys.clear()
        self._bytes.clear()

    def _append(self, record: Record, num_bytes: int) -> None:
        number = next(reversed(self._keys), None)
        if number is None or self._bytes[number] + num_bytes > self._segment_bytes:
            number = next(self._numbers)
            self._keys[number], self._bytes[number] = [], _SEGMENT_BYTES
        self._keys[number] += self.index.learn([record], number)
        self._bytes[number] += num_bytes

    def _evict(self, number: int) -> None:
        """Remove a segment. Records that were loaded are first written again, the most frequently
        loaded first, up to REWRITTEN_SHARE of the segment's bytes."""
        index, keys = self.index, self._keys.pop(number)
        left = int(self._bytes.pop(number) * REWRITTEN_SHARE)
        for key in sorted(keys, key=lambda key: -index.num_hits(key)):
            place = index.place(key)
            assert place is not None, f"{key} is in segment {number}, but not in the index"
            record = Record(*key, *index.tail_parts(key), 0, place.num_bytes, place.digest)
            needed = needed_bytes(record) + _SEGMENT_BYTES
            if index.num_hits(key) and needed <= left and self._may_rewrite(needed):
                self._append(record, needed - _SEGMENT_BYTES)
                index.clear_hits(key)
                left -= needed
            else:
                index.forget(key, place)
                left = 0


class _Queue:
    """A queue of loads or stores, which the disk carries out in their order.

    Invariant: `_waiting` has the moves that have not ended, in their order, with their bytes and
    the times at which they were ordered.
    """

    def __init__(self, speed: Callable[[], LoadSpeed]) -> None:
        self.num_bytes = 0
        self._speed = speed
        self._free_s = 0.0
        self._waiting: deque[tuple[LoadOrder | StoreOrder, int, float]] = deque()

    def add(self, order: LoadOrder | StoreOrder, num_bytes: int, now_s: float) -> None:
        self._waiting.append((order, num_bytes, now_s))
        self.num_bytes += num_bytes

    def next_end_s(self) -> float:
        """The time at which the first move ends; infinite if there is none."""
        if not self._waiting:
            return math.inf
        _, num_bytes, ordered_s = self._waiting[0]
        return max(self._free_s, ordered_s) + self._speed().seconds(num_bytes)

    def pop_ended(self, now_s: float) -> list[tuple[LoadOrder | StoreOrder, int]]:
        """The moves that have ended, with their bytes."""
        ended: list[tuple[LoadOrder | StoreOrder, int]] = []
        while (end_s := self.next_end_s()) <= now_s:
            order, num_bytes, _ = self._waiting.popleft()
            # Only the transfer occupies the device; the next move begins during the latency.
            self._free_s = end_s - self._speed().latency_s
            self.num_bytes -= num_bytes
            ended.append((order, num_bytes))
        return ended

    def cancel(self, order_ids: set[int]) -> list[MoveEnd]:
        """Drop these moves, except the first one, which has begun."""
        left = deque(list(self._waiting)[:1])
        ends: list[MoveEnd] = []
        for each in list(self._waiting)[1:]:
            if each[0].order_id in order_ids:
                self.num_bytes -= each[1]
                ends.append(MoveEnd(each[0].order_id, False))
            else:
                left.append(each)
        self._waiting = left
        return ends


class VirtualDisk:
    """Implements `core.memory.tiers.contract.Tiers`."""

    def __init__(
        self,
        shape: DiskShape,
        groups: Sequence[KVGroup],
        num_blocks: int,
        clock: Callable[[], float],
        wait_until: Callable[[float], None],
    ) -> None:
        """The tier behind `num_blocks` blocks of these KV groups. `clock` returns seconds, and
        `wait_until` sets the clock. Raises ConfigurationError if the folder would be too small."""
        self._bytes_of_group = [group.stored_bytes for group in groups]
        self._clock, self._wait_until = clock, wait_until
        self._speeds = shape.speeds
        self._day_budget = DayBudget(shape.bytes_a_day, clock)
        self._kept = KeptSegments(
            shape.num_bytes,
            segment_bytes_for(shape.num_bytes, max(self._bytes_of_group)),
            self._day_budget.spend,
        )
        self._pace = IoPace()
        self._loads = _Queue(self._load_speed)
        self._stores = _Queue(lambda: LoadSpeed(0.0, shape.speeds.store_s_per_byte))
        pool_bytes = num_blocks * groups[0].bytes_per_block
        self._most_queued = max(int(pool_bytes * QUEUED_SHARE), MIN_QUEUED_BYTES)
        self._ended: list[MoveEnd] = []
        self._written_bytes = 0
        self._over_budget_until_s = clock() + self._day_budget.wait_s(1)

    def find(self, group: int, name: bytes) -> bool:
        return self._kept.index.find(group, name)

    def tails(self, parent: bytes) -> Sequence[Tail]:
        return self._kept.index.tails(parent)

    def start(self, stores: Sequence[StoreOrder], loads: Sequence[LoadOrder]) -> None:
        now_s, sizes = self._clock(), self._bytes_of_group
        for load in loads:
            self._loads.add(load, record_bytes(sizes[load.group]), now_s)
        for store in stores:
            self._stores.add(store, record_bytes(sizes[store.group], len(store.tokens)), now_s)

    def cancel(self, order_ids: Iterable[int]) -> None:
        ids = set(order_ids)
        self._ended += self._loads.cancel(ids) + self._stores.cancel(ids)

    def ended(self) -> list[MoveEnd]:
        self._pace.asked()
        now_s, index = self._clock(), self._kept.index
        ended, self._ended = self._ended, []
        for order, num_bytes in self._stores.pop_ended(now_s):
            assert isinstance(order, StoreOrder)
            ended.append(MoveEnd(order.order_id, self._write(order, num_bytes)))
        for order, _ in self._loads.pop_ended(now_s):
            is_found = index.find(order.group, order.name)
            index.count_hits([(order.group, order.name)])
            ended.append(MoveEnd(order.order_id, is_found))
        return ended

    def load_s(self, contents: Sequence[tuple[int, bytes]]) -> float:
        num_bytes = sum(record_bytes(self._bytes_of_group[group]) for group, _ in contents)
        return self._load_speed().seconds(self._loads.num_bytes + num_bytes)

    @property
    def takes_stores(self) -> bool:
        is_full = self._stores.num_bytes >= self._most_queued
        return not is_full and self._clock() >= self._over_budget_until_s

    def wait(self, timeout_s: float) -> None:
        """Set the clock to the end of the next move, but by at most timeout_s."""
        self._pace.waits()
        next_s = min(self._loads.next_end_s(), self._stores.next_end_s())
        self._wait_until(min(next_s, self._clock() + timeout_s))

    def counts(self) -> Mapping[str, Mapping[str, float]]:
        return {"disk": {"stored_bytes": self._written_bytes}}

    def clear(self) -> None:
        self._kept.clear()

    def close(self) -> None:
        """See `Tiers`. The simulated disk holds no thread and no file."""

    def _load_speed(self) -> LoadSpeed:
        return self._speeds.beside if self._pace.is_beside_steps else self._speeds.alone

    def _write(self, order: StoreOrder, num_bytes: int) -> bool:
        """Store an order's content. Returns False if the daily limit is reached."""
        if self.find(order.group, order.name):
            return True
        if not self._day_budget.spend(num_bytes):
            self._over_budget_until_s = self._clock() + self._day_budget.wait_s(num_bytes)
            return False
        size = self._bytes_of_group[order.group]
        self._kept.append(
            Record(order.group, order.name, order.parent, order.tokens, 0, size, _NO_DIGEST)
        )
        self._written_bytes += size
        return True
