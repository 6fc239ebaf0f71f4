"""Threads that fill blocks from the store, in the order in which they were asked for.

Loads wait in a queue, in batches of READ_BYTES, until a reader takes a batch. Whoever takes a load
out of `_waiting` ends it: a reader, or whoever cancels. A read that hangs keeps only what it
took; another reader is started in its place.
"""

import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from quire.core.memory.tiers.contract import LoadOrder, MoveEnd
from quire.observability.log import get_logger
from quire.tiers.disk.io_limits import Health, IoPace
from quire.tiers.disk.load_rate import NO_SPEED, LoadRate, LoadSpeed, expected_speed
from quire.tiers.disk.pages import Pages
from quire.tiers.disk.store import SegmentStore

READ_BYTES, MAX_READ_BYTES = 1 << 20, 8 << 20
"""Of one read: enough for a disk; and where bytes come from the system's cache so many that what
Python does for a read is little beside it."""
CACHED_BYTES_PER_S = 4e9
"""What one reader gets from the system's cache at least, and from no disk."""
NUM_READERS, MAX_READERS = 3, 6
HANG_S = 3.0
"""A read that has taken so long hangs; with all readers busy, a disk of 5 MB/s takes 0.6 s."""
MIN_HELD_S, HELD_SHARE = 0.02, 1.0
"""A load is held back beside steps until it has taken so long, or so much of what was predicted:
less than what whoever waits for it puts up with."""

logger = get_logger(__name__)


@dataclass(eq=False, slots=True)
class _Request:
    """The loads of one call of `start`. num_left: not ended yet; guarded by the loader's lock."""

    begun_s: float
    predicted_s: float
    num_left: int
    has_failed: bool = False


@dataclass(eq=False, slots=True)
class _LoadBatch:
    """Loads of one request that one read takes. Once it is taken, its orders stay as they are."""

    request: _Request
    orders: list[LoadOrder]


@dataclass(eq=False, slots=True)
class _ReadingThread:
    """since_s: when its read began; None: it waits. num_bytes: of that read. num_bytes_ended: of
    the loads that it has taken and ended; read_bytes: of its next read. All three are written by
    itself alone."""

    since_s: float | None = None
    is_hung: bool = False
    num_bytes: int = 0
    num_bytes_ended: int = 0
    read_bytes: int = READ_BYTES
    thread: threading.Thread | None = field(default=None)


@dataclass(slots=True)
class LoadTimes:
    """Of the requests whose loads all came: what was predicted, and how long it took."""

    num_requests: int = 0
    predicted_s: float = 0.0
    real_s: float = 0.0


class Loader:
    """All but the threads' own work is called from the engine's thread, and never waits."""

    def __init__(
        self,
        store: SegmentStore,
        pages: Pages,
        end: Callable[[list[MoveEnd]], None],
        clock: Callable[[], float],
        pace: IoPace,
    ) -> None:
        """pages: that are filled. end: takes what has ended; called from any thread."""
        self.health = Health(f"{store.path}: loads", clock)
        self._alone, self._beside = LoadRate(), LoadRate()  # with no steps meanwhile, and with some
        self._pace = pace
        self.times = LoadTimes()
        self.num_done = self.num_failed = self.num_cancelled = 0
        self.num_bytes = 0
        self._store, self._pages, self._end, self._clock = store, pages, end, clock
        self._queue: queue.SimpleQueue[_LoadBatch | None] = queue.SimpleQueue()
        self._waiting: dict[_LoadBatch, None] = {}  # in their order
        self._lock = threading.Lock()  # of _waiting, what is in it, and the counters
        self._num_bytes_ordered = self._num_bytes_dropped = 0
        self._is_closed = False
        self._readers: list[_ReadingThread] = []
        for _ in range(NUM_READERS):
            self._start_reader()

    def start(self, orders: Sequence[LoadOrder]) -> None:
        if self._is_closed:
            self._end([MoveEnd(order.order_id, False) for order in orders])
            return
        num_bytes = self._pages.num_bytes_of(orders)
        request = _Request(self._clock(), self.seconds(num_bytes), len(orders))
        self._num_bytes_ordered += num_bytes
        # A reader takes several batches where groups with smaller pages leave room.
        count = max(READ_BYTES // max(self._pages.bytes_of_group), 1)
        for begin in range(0, len(orders), count):
            batch = _LoadBatch(request, list(orders[begin : begin + count]))
            with self._lock:
                self._waiting[batch] = None
            self._queue.put(batch)

    def cancel(self, order_ids: Iterable[int]) -> set[int]:
        """End those that no reader has taken. Returns the ids of those that it does not know."""
        unknown = set(order_ids)
        dropped: list[tuple[_Request, LoadOrder]] = []
        with self._lock:
            for batch in self._waiting:
                found = [order for order in batch.orders if order.order_id in unknown]
                if found:
                    unknown.difference_update(order.order_id for order in found)
                    dropped += [(batch.request, order) for order in found]
                    batch.orders = [order for order in batch.orders if order not in found]
        self._drop(dropped)
        return unknown

    def seconds(self, num_bytes: int) -> float:
        """Until so many bytes would have come, those ahead included; infinite while loads are
        paused, or while all readers hang."""
        return self.speed().seconds(self.num_bytes_ahead + num_bytes)

    def speed(self) -> LoadSpeed:
        """As predicted now."""
        self.check()
        if self._is_closed or self.health.is_paused or all(r.is_hung for r in self._readers):
            return NO_SPEED
        now_s, is_beside = self._clock(), self._pace.is_beside_steps
        speed = expected_speed(self._alone, self._beside, now_s, is_beside_steps=is_beside)
        # Reads that go on say something, too: else a slow disk is tried until the first has ended.
        under_way = [
            (now_s - since_s, reader.num_bytes)
            for reader in self._readers
            if (since_s := reader.since_s) is not None and not reader.is_hung
        ]
        if not under_way:
            return speed
        longest_s = max([took_s for took_s, _ in under_way])
        num_bytes = max(1, sum([num_bytes for _, num_bytes in under_way]))
        return speed._replace(s_per_byte=max(speed.s_per_byte, longest_s / num_bytes))

    @property
    def rate(self) -> LoadRate:
        """Of loads as they would come now."""
        return self._beside if self._pace.is_beside_steps else self._alone

    @property
    def is_reading(self) -> bool:
        """Whether loads may come: not during a pause, nor while all readers hang. By any thread."""
        all_hang = all([reader.is_hung for reader in tuple(self._readers)])
        return not (self.health.is_paused or all_hang)

    @property
    def num_bytes_ahead(self) -> int:
        ended = sum(reader.num_bytes_ended for reader in self._readers)
        return self._num_bytes_ordered - self._num_bytes_dropped - ended

    @property
    def is_busy(self) -> bool:
        """Whether loads wait, or are read by a reader that does not hang."""
        return bool(self._waiting) or any(
            reader.since_s is not None and not reader.is_hung for reader in self._readers
        )

    def check(self) -> None:
        """Notice reads that hang: others are put into their places, and where there can be no more,
        loads that wait end undone."""
        now_s = self._clock()
        for reader in tuple(self._readers):
            since_s = reader.since_s
            if reader.is_hung or since_s is None or now_s - since_s < HANG_S:
                continue
            reader.is_hung = True
            self.health.failed(TimeoutError(f"a read has taken {HANG_S:g} s and goes on"))
            if len(self._readers) < MAX_READERS and not self._is_closed:
                self._start_reader()
        if self._readers and all(reader.is_hung for reader in self._readers):
            self._drop_all()

    def close(self, timeout_s: float) -> bool:
        """End what waits, undone. Returns whether all readers have ended; one that hangs has not,
        and ends when its read does."""
        self._is_closed = True
        self._drop_all()
        deadline_s = self._clock() + timeout_s
        for _ in self._readers:
            self._queue.put(None)
        for reader in self._readers:
            assert reader.thread is not None
            reader.thread.join(max(deadline_s - self._clock(), 0.0))
        return not any(reader.thread and reader.thread.is_alive() for reader in self._readers)

    def _drop_all(self) -> None:
        with self._lock:
            batches = list(self._waiting)
            self._waiting.clear()
        self._drop([(batch.request, order) for batch in batches for order in batch.orders])

    def _drop(self, dropped: Sequence[tuple[_Request, LoadOrder]]) -> None:
        """These end undone."""
        if not dropped:
            return
        self._num_bytes_dropped += self._pages.num_bytes_of([order for _, order in dropped])
        with self._lock:
            self.num_cancelled += len(dropped)
            for request, _ in dropped:
                request.num_left -= 1
                request.has_failed = True
        self._end([MoveEnd(order.order_id, False) for _, order in dropped])

    # -- in the readers' threads ---------------------------------------------------------------

    def _start_reader(self) -> None:
        reader = _ReadingThread()
        reader.thread = threading.Thread(
            target=self._read_on, args=(reader,), name="quire-cache-read", daemon=True
        )
        self._readers.append(reader)
        reader.thread.start()

    def _read_on(self, reader: _ReadingThread) -> None:
        pace = self._pace
        while (batch := self._queue.get()) is not None:
            rate = self.rate
            rate.begun(self._clock())  # what it is held back is a part of what a load takes
            set_aside_s = pace.hold_back(self._patience_s(batch.request))
            began_s = time.thread_time()
            self._read(reader, rate, batch)
            pace.used(time.thread_time() - began_s, set_aside_s)

    def _patience_s(self, request: _Request) -> float:
        """A load that comes later than it was predicted is not held back: it would be given up."""
        limit_s = max(MIN_HELD_S, HELD_SHARE * request.predicted_s)
        return 0.0 if self._is_closed else request.begun_s + limit_s - self._clock()

    def _read(self, reader: _ReadingThread, rate: LoadRate, batch: _LoadBatch) -> None:
        """Fill the blocks of this batch, and of those after it that fit into a read."""
        batches, num_bytes = self._take(batch, reader.read_bytes)
        orders = [order for batch in batches for order in batch.orders]
        if not orders:
            rate.ended(self._clock(), 0.0, 0)
            return
        keys = [order[2:] for order in orders]  # group and name
        targets = self._pages.targets(orders)
        reader.num_bytes = num_bytes
        reader.since_s = since_s = self._clock()
        done, error = self._store.read(keys, targets)
        now_s = self._clock()
        came = num_bytes
        if not all(done):
            came = int(targets.sizes[done].sum())
        # A disk that has hung says nothing about what it does otherwise.
        rate.ended(now_s, now_s - since_s, 0 if reader.is_hung else came)
        is_cached = came >= CACHED_BYTES_PER_S * (now_s - since_s) and rate is self._alone
        reader.read_bytes = min(2 * reader.read_bytes, MAX_READ_BYTES) if is_cached else READ_BYTES
        reader.since_s, reader.is_hung = None, False
        reader.num_bytes_ended += num_bytes
        if error is not None:
            self.health.failed(error)
        elif came:
            self.health.worked()
        self._count(batches, done, came, now_s)
        self._end(list(map(MoveEnd, [order[0] for order in orders], done)))

    def _take(self, batch: _LoadBatch | None, most_bytes: int) -> tuple[list[_LoadBatch], int]:
        """This batch, and those after it as far as they fit into most_bytes, without those that
        were dropped; and the bytes of all."""
        batches: list[_LoadBatch] = []
        num_bytes = 0
        while batch is not None:
            with self._lock:
                is_taken = batch in self._waiting
                self._waiting.pop(batch, None)
            if is_taken:
                batches.append(batch)
                own_bytes = self._pages.num_bytes_of(batch.orders)
                num_bytes += own_bytes
                if num_bytes + own_bytes > most_bytes:
                    break
            try:
                batch = self._queue.get_nowait()
            except queue.Empty:
                break
        else:
            self._queue.put(None)  # it was meant for this thread, after what it has taken
        return batches, num_bytes

    def _count(
        self, batches: Sequence[_LoadBatch], done: Sequence[bool], num_bytes: int, now_s: float
    ) -> None:
        """All orders of these batches have ended, in turn."""
        num_done = sum(done)
        with self._lock:
            self.num_done += num_done
            self.num_failed += len(done) - num_done
            self.num_bytes += num_bytes
            for batch in batches:
                request = batch.request
                request.num_left -= len(batch.orders)
                request.has_failed |= num_done < len(done)
                if request.num_left == 0 and not request.has_failed:
                    self.times.num_requests += 1
                    self.times.predicted_s += request.predicted_s
                    self.times.real_s += now_s - request.begun_s
