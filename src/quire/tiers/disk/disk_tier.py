"""The disk tier: copies of cached blocks in a folder, written behind the steps.

Implements `Tiers` over the pool's memory, as an array of bytes; knows neither models nor torch.
Made in `assembly`, which gives it the fingerprint of all that determines a block's bytes.
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
"""Of the pool's bytes, at most so many wait to be written, but a few always may."""

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class DiskBudget:
    """num_bytes: that the folder takes at most, over all namespaces. bytes_a_day: that are written
    in 24 hours at most, a quarter of them at once; 0: none, None: no limit. Where several ranks use
    the folder, both are of all together: each has an equal share."""

    num_bytes: int
    bytes_a_day: int | None = None

    def __post_init__(self) -> None:
        if self.num_bytes <= 0 or (self.bytes_a_day is not None and self.bytes_a_day < 0):
            raise ValueError(f"{self}: budgets are no debts; for no daily limit give None")


@dataclass(frozen=True, slots=True)
class DiskTierCounters:
    """Counts since the start of the process, and what holds now.

    num_records, used_bytes: what is kept now. *_done, *_failed, *_cancelled: orders, by how they
    ended; loads fail as misses do. over_budget, over_queue: stores that were dropped, for the bytes
    of a day and for a queue that was too long. predicted_load_s, real_load_s: sums over the
    requests of which all loads came. bytes_per_s, latency_s: of loads, as learned.
    """

    num_records: int
    used_bytes: int
    queued_bytes: int
    loads_done: int
    loads_failed: int
    loads_cancelled: int
    loaded_bytes: int
    predicted_load_s: float
    real_load_s: float
    bytes_per_s: float
    latency_s: float
    stores_done: int
    stores_failed: int
    stores_cancelled: int
    stored_bytes: int
    store_s: float
    over_budget: int
    over_queue: int
    rewritten: int
    damaged: int
    load_failures: int
    store_failures: int
    is_reading: bool
    is_writing: bool


class DiskTier:
    """Called from the engine's thread only; no call waits for a disk, `close` aside.

    Invariant: each order that was taken in ends exactly once, by `ended`; unless it is under way in
    a read or write that hangs, and then when this returns. While orders are under way, `ended` is
    to be called at least once a second or so: it notices what hangs.
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
        """Reads the index, and starts the threads. From now on the folder is the tier's to close.

        storage: [num_blocks, bytes of a block], contiguous and writable; the tier reads and writes
            it until `close` has returned, and a read that hangs even later.
        bytes_of_group: how many bytes of a block each group uses, from the first; only these are
            stored.
        wake_up: called from any thread after a store, or all loads of a call, have ended, or some
            have failed; must not wait.

        Raises ConfigurationError where the budget is too small, OSError where the folder can't be
        read.
        """
        self._pages = pages = Pages(storage, bytes_of_group)
        size = folder.part.size
        segment_bytes = segment_bytes_for(budget.num_bytes, max(bytes_of_group), size)
        bytes_a_day = None if budget.bytes_a_day is None else budget.bytes_a_day // size
        began_s = clock()
        day_budget = DayBudget(bytes_a_day, clock, folder)
        self.store = SegmentStore(
            *(folder, fingerprint, budget.num_bytes // size, segment_bytes), day_budget.take
        )
        logger.info(
            "%s: %d records found in %.3f s",
            self.store.path,
            len(self.store.index),
            clock() - began_s,
        )
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
        """Raises ValueError for a name that no record can hold."""
        if loads:
            self._loader.start(loads)
        if stores:
            self._writer.start(stores)

    def cancel(self, order_ids: Iterable[int]) -> None:
        self._writer.cancel(self._loader.cancel(order_ids))

    def ended(self) -> list[MoveEnd]:
        self._pace.asked()
        if self._has_ended.is_set():  # without a lock, in a step that has nothing to take in
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
        """Of this tier's loads, as predicted now."""
        return self._loader.speed()

    def load_s_at(self, speed: LoadSpeed, contents: Sequence[tuple[int, bytes]]) -> float:
        """What `load_s` would say if loads came at this speed."""
        return speed.seconds(self._loader.num_bytes_ahead + self._num_bytes(contents))

    def forget(self, group: int, name: bytes) -> None:
        """A content is not found any more, until it is stored again, or by the next process."""
        if (place := self.store.index.place((group, name))) is not None:
            self.store.index.forget((group, name), place)

    @property
    def is_beside_steps(self) -> bool:
        """Whether the engine computes, and does not wait for what ends. By any thread."""
        return self._pace.is_beside_steps

    @property
    def takes_stores(self) -> bool:
        return self._writer.takes_orders

    def wait(self, timeout_s: float) -> None:
        self._pace.waits()
        self._has_ended.wait(timeout_s)

    def clear(self) -> None:
        """The files go a little later; after a crash before that, they are found again."""
        self._writer.clear()

    def close(self, timeout_s: float = 10.0) -> None:
        """End what loads wait, write what was ordered, as far as it goes in timeout_s, seal, and
        let others have the folder. Returns after timeout_s and a second at most, also if the disk
        hangs; the folder then stays locked until the process ends, so that a write which returns
        late can't meet another process' writes."""
        self._loader.close(min(timeout_s, 0.5))
        if self._writer.close(timeout_s):
            for close in (self.store.close, self._folder.close):
                try:
                    close()
                except OSError as error:  # the system has closed the file all the same
                    logger.warning("%s: closed with an error: %s", self._folder.path, error)
        else:
            logger.warning("%s: a write hangs; the folder stays locked", self._folder.path)

    def counters(self) -> DiskTierCounters:
        """May be called from any thread."""
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
        """`counters` by name, under the tier's name, "disk"."""
        return {"disk": asdict(self.counters())}

    def _num_bytes(self, contents: Sequence[tuple[int, bytes]]) -> int:
        """With their records' headers."""
        sizes = [record_bytes(size) for size in self._pages.bytes_of_group]
        return sum([sizes[group] for group, _ in contents])

    def _end(self, ended: list[MoveEnd], wakes: bool = True) -> None:
        self._ended.append(ended)
        if wakes:
            self._has_ended.set()
            self._wake_up()
