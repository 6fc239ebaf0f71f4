"""Reader threads that load cached blocks from disk, first come, first served.

The loads of one call of `start` form a request. A reader takes as many waiting loads as fit into
one read. The thread that takes a load out of its request (a reader, or the caller of `cancel`) also
reports the load's end. A read that hangs blocks only its own loads, and a new reader is started in
place of the hung one.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import compress

from quire.core.memory.tiers.contract import LoadOrder, MoveEnd
from quire.tiers.disk.io_limits import Health, IoPace
from quire.tiers.disk.load_rate import NO_SPEED, LoadRate, LoadSpeed, expected_speed
from quire.tiers.disk.pages import Pages
from quire.tiers.disk.store import SegmentStore

READ_BYTES, MAX_READ_BYTES = 1 << 20, 12 << 20
"""Minimum and maximum bytes of one read. READ_BYTES is large enough for a disk's full bandwidth.
MAX_READ_BYTES is small enough that the loads of a large request end in several portions."""
READ_S = 1e-3
"""Target duration of a read from fast storage, such as the page cache; Python's overhead per read
is small compared to it."""
NUM_READERS, MAX_READERS = 2, 6
HANG_S = 3.0
"""A read that takes this many seconds counts as hung. With all readers busy, a disk of 5 MB/s takes
0.6 s per read.
"""
MIN_HELD_S, HELD_SHARE = 0.02, 1.0
"""While steps run, a load is throttled until MIN_HELD_S or HELD_SHARE of its predicted time has
passed, whichever is longer. This is shorter than the time after which the scheduler gives up a
load."""


@dataclass(eq=False, slots=True)
class _Request:
    """The loads of one call of `start`. Guarded by the loader's lock."""

    begun_s: float
    predicted_s: float
    #: The loads that no reader has taken.
    waiting: list[LoadOrder]
    #: Number of loads that have not ended.
    num_left: int
    has_failed: bool = False


_Part = tuple[_Request, list[LoadOrder]]
"""Loads of one request that are part of one read."""


@dataclass(eq=False, slots=True)
class _ReadingThread:
    """State of a reader. Only its own thread writes the sizes."""

    #: Time when the reader's current read began; None while the reader waits.
    since_s: float | None = None
    is_hung: bool = False
    #: Bytes of the reader's current read.
    num_bytes: int = 0
    #: Total bytes of the loads that the reader has ended.
    num_bytes_ended: int = 0
    #: Size limit of the reader's next read in bytes.
    read_bytes: int = READ_BYTES
    thread: threading.Thread | None = field(default=None)


@dataclass(slots=True)
class LoadTimes:
    """Predicted and measured seconds, summed over the requests whose loads all succeeded."""

    num_requests: int = 0
    predicted_s: float = 0.0
    real_s: float = 0.0


class Loader:
    """Loads blocks in threads. Its public methods are called from the engine's thread; only `close`
    blocks."""

    def __init__(
        self,
        store: SegmentStore,
        pages: Pages,
        end: Callable[[list[MoveEnd], bool], None],
        clock: Callable[[], float],
        pace: IoPace,
    ) -> None:
        """The loads fill `pages`. `end` is called from any thread with the ended loads and True if
        the engine should be woken."""
        self.health = Health(f"{store.path}: loads", clock)
        # Speed of loads while no step runs, and while steps run.
        self._alone, self._beside = LoadRate(), LoadRate()
        self._pace = pace
        self.times = LoadTimes()
        self.num_done = self.num_failed = self.num_cancelled = 0
        self.num_bytes = 0
        self._store, self._pages, self._end, self._clock = store, pages, end, clock
        #: Requests with waiting loads, oldest first.
        self._requests: deque[_Request] = deque()
        self._lock = threading.Lock()  # guards _requests, their content, and the counters
        self._has_requests = threading.Condition(self._lock)
        self._num_bytes_ordered = self._num_bytes_dropped = 0
        self._is_closed = False
        self._readers: list[_ReadingThread] = []
        for _ in range(NUM_READERS):
            self._start_reader()

    def start(self, orders: Sequence[LoadOrder]) -> None:
        if self._is_closed:
            self._end([MoveEnd(order.order_id, False) for order in orders], True)
            return
        num_bytes = self._pages.num_bytes_of(orders)
        request = _Request(self._clock(), self.seconds(num_bytes), list(orders), len(orders))
        self._num_bytes_ordered += num_bytes
        with self._lock:
            self._requests.append(request)
            self._has_requests.notify(-(-num_bytes // READ_BYTES))

    def cancel(self, order_ids: Iterable[int]) -> set[int]:
        """Fail those of the given loads that no reader has taken. Returns the other ids."""
        unknown = set(order_ids)
        dropped: list[_Part] = []
        with self._lock:
            for request in self._requests:
                found = [order for order in request.waiting if order.order_id in unknown]
                if found:
                    ids = {order.order_id for order in found}
                    unknown -= ids
                    request.waiting = [each for each in request.waiting if each.order_id not in ids]
                    dropped.append((request, found))
        self._drop(dropped)
        return unknown

    def seconds(self, num_bytes: int) -> float:
        """Predicted seconds to load all queued bytes and then `num_bytes` more. inf while loads are
        paused or all readers hang."""
        return self.speed().seconds(self.num_bytes_ahead + num_bytes)

    def speed(self) -> LoadSpeed:
        """The predicted speed now."""
        self.check()
        if self._is_closed or self.health.is_paused or all(r.is_hung for r in self._readers):
            return NO_SPEED
        now_s, is_beside = self._clock(), self._pace.is_beside_steps
        speed = expected_speed(self._alone, self._beside, now_s, is_beside_steps=is_beside)
        # Include reads that are still running; otherwise a slow disk would be used until its first
        # read has ended.
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
        """The rate measured in the current condition: while steps run, or while no step runs."""
        return self._beside if self._pace.is_beside_steps else self._alone

    @property
    def is_reading(self) -> bool:
        """False during a pause after a failure and while all readers hang. May be read by any
        thread."""
        all_hang = all([reader.is_hung for reader in tuple(self._readers)])
        return not (self.health.is_paused or all_hang)

    @property
    def num_bytes_ahead(self) -> int:
        ended = sum(reader.num_bytes_ended for reader in self._readers)
        return self._num_bytes_ordered - self._num_bytes_dropped - ended

    @property
    def is_busy(self) -> bool:
        """True if loads are waiting, or a reader that does not hang is reading."""
        return bool(self._requests) or any(
            reader.since_s is not None and not reader.is_hung for reader in self._readers
        )

    def check(self) -> None:
        """Detect reads that hang, and start new readers in their place. If all MAX_READERS hang,
        fail the waiting loads."""
        now_s = self._clock()
        for reader in tuple(self._readers):
            since_s = reader.since_s
            if reader.is_hung or since_s is None or now_s - since_s < HANG_S:
                continue
            reader.is_hung = True
            if reader.since_s is not since_s:  # it has just ended
                reader.is_hung = False
                continue
            self.health.failed(TimeoutError(f"a read has taken {HANG_S:g} s and goes on"))
            if len(self._readers) < MAX_READERS and not self._is_closed:
                self._start_reader()
        if self._readers and all(reader.is_hung for reader in self._readers):
            self._drop_all()

    def close(self, timeout_s: float) -> bool:
        """Fail all waiting loads. Returns True if all readers have ended, False if a reader hangs
        after `timeout_s`; it ends when its read returns."""
        with self._lock:
            self._is_closed = True
            self._has_requests.notify_all()
        self._drop_all()
        deadline_s = self._clock() + timeout_s
        for reader in self._readers:
            assert reader.thread is not None
            reader.thread.join(max(deadline_s - self._clock(), 0.0))
        return not any(reader.thread and reader.thread.is_alive() for reader in self._readers)

    def _drop_all(self) -> None:
        with self._lock:
            dropped = [(request, request.waiting) for request in self._requests]
            for request in self._requests:
                request.waiting = []
            self._requests.clear()
        self._drop(dropped)

    def _drop(self, dropped: Sequence[_Part]) -> None:
        """Fail these loads."""
        orders = [order for _, orders in dropped for order in orders]
        if not orders:
            return
        self._num_bytes_dropped += self._pages.num_bytes_of(orders)
        with self._lock:
            self.num_cancelled += len(orders)
            for request, own in dropped:
                request.num_left -= len(own)
                request.has_failed = True
        self._end([MoveEnd(order.order_id, False) for order in orders], True)

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
        while (request := self._next_request()) is not None:
            rate = self.rate
            rate.begun(self._clock())  # the measured time includes the delay below
            set_aside_s = pace.wait_turn(self._patience_s(request))
            began_s = time.thread_time()
            self._read(reader, rate, self._next_loads(reader.read_bytes))
            pace.used(time.thread_time() - began_s, set_aside_s)

    def _next_request(self) -> _Request | None:
        """Wait for a request and return the first one with waiting loads; None when the loader is
        closed."""
        with self._lock:
            while not self._requests and not self._is_closed:
                self._has_requests.wait()
            return self._requests[0] if self._requests else None

    def _patience_s(self, request: _Request) -> float:
        """Seconds for which the request's loads may still be throttled. 0 or less if they are late:
        more throttling could make the scheduler give them up."""
        limit_s = max(MIN_HELD_S, HELD_SHARE * request.predicted_s)
        return 0.0 if self._is_closed else request.begun_s + limit_s - self._clock()

    def _read(self, reader: _ReadingThread, rate: LoadRate, parts: Sequence[_Part]) -> None:
        """Read the blocks of these loads, and report the loads' ends."""
        # First, read all blocks by one call.
        orders = parts[0][1] if len(parts) == 1 else [each for _, own in parts for each in own]
        if not orders:  # another reader has taken them
            rate.ended(self._clock(), 0.0, 0)
            return
        reader.num_bytes = num_bytes = self._pages.num_bytes_of(orders)
        reader.since_s = since_s = self._clock()
        try:
            keys = [order[2:] for order in orders]  # group and name
            done, error = self._store.read(keys, self._pages.targets(orders))
        except Exception as raised:
            # No error may end a reader, because the loads that it has taken would keep their blocks
            # forever.
            done, error = [False] * len(orders), raised
        # Then learn from the read.
        now_s = self._clock()
        came = num_bytes
        if not all(done):
            came = self._pages.num_bytes_of(list(compress(orders, done)))
        # A read that hung says nothing about the disk's normal speed.
        rate.ended(now_s, now_s - since_s, 0 if reader.is_hung else came)
        reader.read_bytes = READ_BYTES
        if rate is self._alone:
            in_time = int(came * READ_S / max(now_s - since_s, 1e-6))
            reader.read_bytes = min(max(in_time, READ_BYTES), MAX_READ_BYTES)
        reader.since_s, reader.is_hung = None, False
        reader.num_bytes_ended += num_bytes
        # Last, report success or failure, and end the loads.
        if error is not None:
            self.health.failed(error)
        elif came:
            self.health.record_success()
        ends = list(map(MoveEnd, [order[0] for order in orders], done))
        # A request waits for all of its loads, so the engine is not woken for each read.
        self._end(ends, self._count(parts, done, came, now_s) or not all(done))

    def _next_loads(self, most_bytes: int) -> list[_Part]:
        """Take the loads that have waited longest: as many as surely fit into `most_bytes`, but at
        least one."""
        parts: list[_Part] = []
        count = max(most_bytes // max(self._pages.bytes_of_group), 1)
        with self._lock:
            while self._requests and count > 0:
                request = self._requests[0]
                taken = request.waiting[:count]
                del request.waiting[:count]
                if not request.waiting:
                    self._requests.popleft()
                count -= len(taken)
                parts.append((request, taken))
        return parts

    def _count(
        self, parts: Sequence[_Part], done: Sequence[bool], num_bytes: int, now_s: float
    ) -> bool:
        """Update the counters for these ended loads. Returns True if they were the last loads of
        any request."""
        num_done, has_ended = sum(done), False
        with self._lock:
            self.num_done += num_done
            self.num_failed += len(done) - num_done
            self.num_bytes += num_bytes
            for request, orders in parts:
                request.num_left -= len(orders)
                request.has_failed |= num_done < len(done)
                has_ended |= request.num_left == 0
                if request.num_left == 0 and not request.has_failed:
                    self.times.num_requests += 1
                    self.times.predicted_s += request.predicted_s
                    self.times.real_s += now_s - request.begun_s
        return has_ended
