"""The disk tier: stores copies of cached KV blocks in a folder, with background threads.

It implements `Tiers` for the block pool's memory, which it treats as an array of bytes. An order
asks it to copy one block to disk (store) or back (load); a content is what a block holds for one KV
group. `assembly` makes it, with a fingerprint of everything that determines a block's bytes.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray

from quire.core.memory.tiers.contract import LoadOrder, MoveEnd, StoreOrder, Tail
from quire.observability.log import get_logger
from quire.tiers.disk.folder import CacheFolder
from quire.tiers.disk.io_limits import DayBudget, IoPace
from quire.tiers.disk.load_rate import LoadSpeed
from quire.tiers.disk.loader import Loader
from quire.tiers.disk.pages import Pages
from quire.tiers.disk.record import record_bytes
from quire.tiers.disk.store import SegmentStore, segment_bytes_for
from quire.tiers.disk.write_behind import StoreWriter

QUEUED_SHARE, MIN_QUEUED_BYTES = 1 / 8, 16 << 20
"""Limit of the bytes that wait to be written: this share of the pool's bytes, but at least
MIN_QUEUED_BYTES."""

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class DiskBudget:
    """Limits of the cache folder's size and of the bytes written to it. If several ranks share the
    folder, each gets an equal part of both."""

    #: Bytes that the folder may hold, summed over all namespaces (one for each model and format of
    #: blocks).
    num_bytes: int
    #: Bytes that may be written in 24 hours; a quarter of them may be written at once. 0 allows no
    #: writes, None sets no limit.
    bytes_a_day: int | None = None

    def __post_init__(self) -> None:
        if self.num_bytes <= 0 or (self.bytes_a_day is not None and self.bytes_a_day < 0):
            raise ValueError(
                f"{self}: num_bytes must be above 0, and bytes_a_day at least 0 or None"
            )


@dataclass(frozen=True, slots=True)
class DiskTierCounters:
    """Counters since the start of the process, and some current values."""

    #: Number of records that are stored now. A record is a content with its header.
    num_records: int
    #: Bytes of all segment files in the folder.
    used_bytes: int
    #: Bytes that wait to be written.
    queued_bytes: int
    #: Number of loads that have succeeded.
    loads_done: int
    #: Number of loads that have failed, which the caller treats as cache misses.
    loads_failed: int
    loads_cancelled: int
    loaded_bytes: int
    #: Predicted seconds of loads, summed over those calls of `start` whose loads all succeeded.
    predicted_load_s: float
    #: Measured seconds of the same loads.
    real_load_s: float
    #: Measured bandwidth of loads, as a moving average.
    bytes_per_s: float
    #: Measured latency of loads, as a moving average.
    latency_s: float
    stores_done: int
    stores_failed: int
    stores_cancelled: int
    stored_bytes: int
    store_s: float
    #: Number of stores that were dropped because the daily limit of written bytes was reached.
    over_budget: int
    #: Number of stores that were dropped because the queue was full.
    over_queue: int
    #: Number of records that were copied to a new segment when their segment was evicted.
    rewritten: int
    damaged: int
    #: Number of failed read operations.
    load_failures: int
    #: Number of failed write operations.
    store_failures: int
    is_reading: bool
    is_writing: bool


class DiskTier:
    """The disk tier, called from the engine's thread only. No call except `close` and `wait` waits
    for the disk.

    Invariant: `ended` reports each accepted order exactly once. An order whose read or write hangs
    ends when the read or write returns. While orders are in flight, the engine has to call `ended`
    about once a second, because that call detects operations that hang.
    """

    def __init__(
        self,
        folder: CacheFolder,
        fingerprint: bytes,
        budget: DiskBudget,
        storage: NDArray[np.uint8],
        bytes_of_group: Sequence[int],
        wake_up: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Read the index and start the threads. The tier then owns the folder and closes it.

        `storage` is [num_blocks, bytes of a block], contiguous and writable. The tier reads and
        writes it until `close` has returned; a read that hangs may write even later. Group g uses
        the first `bytes_of_group[g]` bytes of a block; only these bytes are stored. `wake_up` is
        called from any thread when a store has ended, when all loads of one call of `start` have
        ended, and when a load has failed. It must not wait.

        Raises ConfigurationError if the budget is too small, OSError if the folder can't be read.
        """
        # First, compute this rank's share of the budget, and read the index.
        self._pages = pages = Pages(storage, bytes_of_group)
        size = folder.part.size
        segment_bytes = segment_bytes_for(budget.num_bytes, max(bytes_of_group), size)
        bytes_a_day = None if budget.bytes_a_day is None else budget.bytes_a_day // size
        began_s = clock()
        day_budget = DayBudget(bytes_a_day, clock, folder)
        self.store = SegmentStore(
            *(folder, fingerprint, budget.num_bytes // size, segment_bytes), day_budget.spend
        )
        logger.info(
            "%s: %d records found in %.3f s",
            self.store.path,
            len(self.store.index),
            clock() - began_s,
        )
        # Then start the threads, which share one throttle and one queue of ended orders.
        self._folder, self._wake_up, self._clock = folder, wake_up, clock
        self._ended: deque[list[MoveEnd]] = deque()
        self._has_ended = threading.Event()
        self._pace = IoPace()
        self._loader = Loader(self.store, pages, self._end, clock, self._pace)
        self._writer = StoreWriter(
            *(self.store, pages, self._end),
            *(day_budget, clock),
            pace=self._pace,
            max_queued_bytes=max(int(pages.num_bytes * QUEUED_SHARE), MIN_QUEUED_BYTES),
            are_loads_busy=lambda: self._loader.is_busy,
        )

    def find(self, group: int, name: bytes) -> bool:
        return self.store.index.find(group, name)

    def tails(self, parent: bytes) -> Sequence[Tail]:
        return self.store.index.tails(parent)

    def start(self, stores: Sequence[StoreOrder], loads: Sequence[LoadOrder]) -> None:
        """Start stores and loads. Raises ValueError if a name is too long for a record."""
        if loads:
            self._loader.start(loads)
        if stores:
            self._writer.start(stores)

    def cancel(self, order_ids: Iterable[int]) -> None:
        self._writer.cancel(self._loader.cancel(order_ids))

    def ended(self) -> list[MoveEnd]:
        self._pace.asked()
        # Check without a lock, since this runs in every step and mostly finds nothing.
        if self._has_ended.is_set():
            self._has_ended.clear()
        self._loader.check()
        self._writer.check()
        ended: list[MoveEnd] = []
        while self._ended:
            ended += self._ended.popleft()
        return ended

    def load_s(self, contents: Sequence[tuple[int, bytes]]) -> float:
        return self._loader.seconds(self._num_bytes(contents))

    def load_speed(self) -> LoadSpeed:
        """The predicted speed of this tier's loads."""
        return self._loader.speed()

    def load_s_at(self, speed: LoadSpeed, contents: Sequence[tuple[int, bytes]]) -> float:
        """The seconds that `load_s` would return if loads had this speed."""
        return speed.seconds(self._loader.num_bytes_ahead + self._num_bytes(contents))

    def forget(self, group: int, name: bytes) -> None:
        """Remove a content from the index until it is stored again. Its record stays on disk, so a
        later process may find it."""
        if (place := self.store.index.place((group, name))) is not None:
            self.store.index.forget((group, name), place)

    @property
    def is_beside_steps(self) -> bool:
        """True if the engine is running steps, False if it waits for moves. May be read by any
        thread."""
        return self._pace.is_beside_steps

    @property
    def takes_stores(self) -> bool:
        return self._writer.takes_orders

    def wait(self, timeout_s: float) -> None:
        self._pace.waits()
        self._has_ended.wait(timeout_s)

    def clear(self) -> None:
        """Remove all contents. The files are removed a little later; if the process crashes before
        that, the next process finds the contents again."""
        self._writer.clear()

    def close(self, timeout_s: float = 10.0) -> None:
        """Fail the waiting loads, write waiting stores until `timeout_s` has passed, seal the
        segment, and unlock the folder.

        Returns after at most `timeout_s` plus 1 s, even if the disk hangs. If a write hangs, the
        folder stays locked until the process ends, so that the late write can't collide with
        another process.
        """
        self._loader.close(min(timeout_s, 0.5))
        if self._writer.close(timeout_s):
            for close in (self.store.close, self._folder.close):
                try:
                    close()
                except OSError as error:  # the system closes a file even if it reports an error
                    logger.warning("%s: closed with an error: %s", self._folder.path, error)
        else:
            logger.warning("%s: a write hangs; the folder stays locked", self._folder.path)

    def counters(self) -> DiskTierCounters:
        """The current counters. May be called from any thread."""
        loader, writer, store = self._loader, self._writer, self.store
        return DiskTierCounters(
            num_records=len(store.index),
            used_bytes=store.used_bytes,
            queued_bytes=writer.num_bytes_ahead,
            loads_done=loader.num_done,
            loads_failed=loader.num_failed,
            loads_cancelled=loader.num_cancelled,
            loaded_bytes=loader.num_bytes,
            predicted_load_s=loader.times.predicted_s,
            real_load_s=loader.times.real_s,
            bytes_per_s=loader.rate.bytes_per_s,
            latency_s=loader.rate.latency_s,
            stores_done=writer.num_done,
            stores_failed=writer.num_failed,
            stores_cancelled=writer.num_cancelled,
            stored_bytes=writer.num_bytes,
            store_s=writer.seconds,
            over_budget=writer.num_over_budget,
            over_queue=writer.num_over_queue,
            rewritten=store.num_rewritten,
            damaged=store.damage.num_records,
            load_failures=loader.health.num_failures,
            store_failures=writer.health.num_failures,
            is_reading=loader.is_reading,
            is_writing=writer.is_writing,
        )

    def counts(self) -> dict[str, dict[str, float]]:
        """{"disk": `counters` as a dict}."""
        return {"disk": asdict(self.counters())}

    def _num_bytes(self, contents: Sequence[tuple[int, bytes]]) -> int:
        """Number of bytes of these contents on disk, including record headers."""
        sizes = [record_bytes(size) for size in self._pages.bytes_of_group]
        return sum([sizes[group] for group, _ in contents])

    def _end(self, ended: list[MoveEnd], wakes: bool = True) -> None:
        self._ended.append(ended)
        if wakes:
            self._has_ended.set()
            self._wake_up()
