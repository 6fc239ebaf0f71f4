"""The background thread that writes cached blocks to disk.

A store order waits in a queue, and its block can't be reused, until the thread has written it.
Orders fail at once when the queue is full, the daily limit of bytes is reached, or the disk fails.
A failed store only costs a later cache miss, but a block that is held too long costs memory now.
"""

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from quire.core.memory.tiers.contract import MoveEnd, StoreOrder
from quire.observability.log import get_logger
from quire.tiers.disk.io_limits import DayBudget, Health, IoPace
from quire.tiers.disk.pages import Pages
from quire.tiers.disk.record import MAX_GROUPS, MAX_NAME_BYTES, MAX_TOKENS_BYTES, record_bytes
from quire.tiers.disk.store import SegmentStore

WRITE_BYTES = 1 << 20
"""Bytes of one write; small, so that loads do not wait long for a write."""
MAX_ORDERS = 256
"""Maximum number of orders in one write."""
HANG_S = 10.0
"""A write or sync that takes this many seconds counts as hung. Orders that wait behind it fail."""
SEAL_S = 1.0
"""Seconds beyond the timeout of `close` for sealing the segment."""
YIELD_S, YIELD_STEP_S = 0.02, 0.005
"""Longest time that a write waits for loads to end, and the polling interval, in seconds. If loads
never end, 50 MB/s are still written."""
MOST_HELD_S = 0.1
"""Longest time in seconds that a write is throttled while steps run. It is short because waiting
orders hold blocks.
"""

logger = get_logger(__name__)


class StoreWriter:
    """Writes blocks in a thread. Its public methods are called from the engine's thread; only
    `close` blocks."""

    def __init__(
        self,
        store: SegmentStore,
        pages: Pages,
        end: Callable[[list[MoveEnd]], None],
        day_budget: DayBudget,
        clock: Callable[[], float],
        *,
        pace: IoPace,
        max_queued_bytes: int,
        are_loads_busy: Callable[[], bool],
    ) -> None:
        """The stores read blocks from `pages`. `end` is called from any thread with the ended
        stores. While `are_loads_busy()` is True, writes wait a little."""
        self.health = Health(f"{store.path}: stores", clock)
        self.num_done = self.num_failed = self.num_cancelled = 0
        self.num_over_budget = self.num_over_queue = 0
        self.num_bytes, self.seconds = 0, 0.0
        self._store, self._pages, self._end, self._clock = store, pages, end, clock
        self._index = store.index
        self._day_budget, self._max_queued_bytes = day_budget, max_queued_bytes
        self._are_loads_busy, self._pace = are_loads_busy, pace
        # Each item holds the orders of one call of `start`, since waking the thread is expensive.
        # None wakes the thread to clear or to end.
        self._queue: queue.SimpleQueue[list[StoreOrder] | None] = queue.SimpleQueue()
        #: Orders taken out of the queue; only the thread uses this.
        self._pending: deque[StoreOrder] = deque()
        self._waiting: dict[int, StoreOrder] = {}
        self._queued_bytes = self._taken_bytes = 0  # each is changed by a single thread
        #: Time when the current disk operation began; None while there is none.
        self._since_s: float | None = None
        self._is_hung = self._is_closed = self._must_clear = False
        self._is_prepared, self._is_removed = False, True  # used only by the thread
        self._give_up_s = float("-inf")
        self._out_of_budget_until_s = clock() + day_budget.wait_s(1)
        self._thread = threading.Thread(
            target=self._write_on, name="quire-cache-write", daemon=True
        )
        self._thread.start()

    @property
    def takes_orders(self) -> bool:
        self.check()
        return not (
            self._is_closed
            or self._is_hung
            or self.health.is_paused
            or self.num_bytes_ahead >= self._max_queued_bytes
            or self._clock() < self._out_of_budget_until_s
        )

    @property
    def is_writing(self) -> bool:
        """True if new orders will be written. False after a failure until a write succeeds, while a
        write hangs, and while the daily limit is reached. May be read by any thread."""
        is_out_of_budget = self._clock() < self._out_of_budget_until_s
        return self.health.is_good and not self._is_hung and not is_out_of_budget

    @property
    def num_bytes_ahead(self) -> int:
        return self._queued_bytes - self._taken_bytes

    def start(self, orders: Sequence[StoreOrder]) -> None:
        """Queue stores. Raises ValueError if an order does not fit the record format."""
        ended, taken = [], []
        for order in orders:
            _check_order(order)
            if self._index.find(order.group, order.name):
                ended.append(MoveEnd(order.order_id, True))
                continue
            # The queue may grow to twice its limit, since the caller checks `takes_orders` only
            # once before it sends several orders.
            is_full = self.num_bytes_ahead >= 2 * self._max_queued_bytes
            if self._is_closed or self._is_hung or is_full:
                self.num_over_queue += 1
                ended.append(MoveEnd(order.order_id, False))
                continue
            self._queued_bytes += self._pages.num_bytes_of([order])
            self._waiting[order.order_id] = order
            taken.append(order)
        if taken:
            self._queue.put(taken)
        if ended:
            self._end(ended)

    def cancel(self, order_ids: Iterable[int]) -> None:
        """Fail the given orders that the thread has not taken. Unknown ids are ignored."""
        self._drop(list(order_ids))

    def check(self) -> None:
        """Detect a write that hangs, and fail the orders that wait behind it."""
        since_s = self._since_s
        if since_s is None or self._clock() - since_s < HANG_S:
            self._is_hung = False
            return
        if not self._is_hung:
            self._is_hung = True
            self.health.failed(TimeoutError(f"a write has taken {HANG_S:g} s and goes on"))
        self._drop(list(self._waiting))

    def clear(self) -> None:
        """Fail all waiting orders, empty the index, and let the thread remove all files."""
        self._must_clear = True
        self._drop(list(self._waiting))
        self._index.forget_all()
        self._queue.put(None)

    def close(self, timeout_s: float) -> bool:
        """Write waiting orders until `timeout_s` has passed, and seal the segment. Returns True if
        the thread has ended, False if a write hangs."""
        self._give_up_s = self._clock() + timeout_s
        self._is_closed = True
        self._queue.put(None)
        self._thread.join(timeout_s + SEAL_S)
        if self._thread.is_alive():
            self._drop(list(self._waiting))
        return not self._thread.is_alive()

    def _drop(self, order_ids: Sequence[int]) -> None:
        """Fail those of the given orders that the thread has not taken."""
        ended = []
        for order_id in order_ids:
            order = self._waiting.pop(order_id, None)
            if order is not None:
                self._queued_bytes -= self._pages.num_bytes_of([order])
                ended.append(MoveEnd(order_id, False))
        self.num_cancelled += len(ended)
        if ended:
            self._end(ended)

    # -- in the thread -----------------------------------------------------------------------------

    def _write_on(self) -> None:
        if not self._day_budget.is_none:  # with a limit of 0 bytes, the folder is never changed
            self._try(self._prepare_store)
        is_open = True
        while is_open:
            orders, is_open = self._next_orders()
            # After `clear`, remove the files. Orders that were taken before `clear` fail.
            if self._must_clear:
                self._must_clear = self._is_removed = False
                self._try(self._prepare_store)
                # Later orders are still in the queue, after the None of `clear`.
                self.num_failed += len(orders)
                self._end([MoveEnd(order.order_id, False) for order in orders])
            elif orders:
                self._yield_to_loads()
                set_aside_s = self._pace.wait_turn(0.0 if self._is_closed else MOST_HELD_S)
                began_s = time.thread_time()
                self._write(orders)
                self._pace.used(time.thread_time() - began_s, set_aside_s)
        # At the end, finish a pending removal, seal the segment and save the spent bytes.
        if not self._is_removed:
            self._try(self._prepare_store)
        self._try(self._store.seal)
        self._try(self._day_budget.close)

    def _prepare_store(self) -> None:
        """Do what has to precede a write and has not succeeded yet: a pending removal of all files,
        then `prepare_to_write`."""
        if not self._is_removed:
            self._store.remove_all()
            self._is_removed = True
        if not (self._is_prepared or self._day_budget.is_none):
            self._store.prepare_to_write()
            self._is_prepared = True

    def _next_orders(self) -> tuple[list[StoreOrder], bool]:
        """Wait for orders, and take as many as fit into one write, skipping cancelled orders. Also
        returns False if no more can come. None in the queue wakes the thread to clear or to end."""
        orders: list[StoreOrder] = []
        num_bytes, is_woken = 0, False
        while num_bytes < WRITE_BYTES and len(orders) < MAX_ORDERS:
            if not self._pending:
                if orders and self._queue.empty():
                    break
                came = self._queue.get()
                if came is None:
                    is_woken = True
                    break
                self._pending.extend(came)
            order = self._pending.popleft()
            if self._waiting.pop(order.order_id, None) is not None:
                orders.append(order)
                num_bytes += self._pages.num_bytes_of([order])
        self._taken_bytes += num_bytes
        is_last = is_woken and self._is_closed and self._queue.empty()
        return orders, not is_last

    def _yield_to_loads(self) -> None:
        until_s = time.monotonic() + YIELD_S
        while not self._is_closed and self._are_loads_busy() and time.monotonic() < until_s:
            time.sleep(YIELD_STEP_S)

    def _write(self, orders: Sequence[StoreOrder]) -> None:
        """Write the orders that are new and within the limits, and report the ends of all
        orders."""
        with self._timed_operation():  # `_chosen` writes the ledger to disk, which may hang
            written = self._chosen(orders)
        if written:
            payloads = self._pages.views(written)
            before_s = self._clock()
            self._try(self._prepare_store, lambda: self._store.append(written, payloads))
            self.seconds += self._clock() - before_s
            if self._must_clear:  # `clear` was called meanwhile
                self._index.forget_all()
            for order, payload in zip(written, payloads, strict=True):
                if self._index.find(order.group, order.name):
                    self.num_bytes += len(payload)
        ended = [
            MoveEnd(order.order_id, self._index.find(order.group, order.name)) for order in orders
        ]
        num_done = sum(end.is_done for end in ended)
        self.num_done += num_done
        self.num_failed += len(ended) - num_done
        self._end(ended)

    def _chosen(self, orders: Sequence[StoreOrder]) -> list[StoreOrder]:
        """The orders to write: those of contents that are not stored yet, without duplicates,
        within the limits."""
        chosen: dict[tuple[int, bytes], StoreOrder] = {}
        if self.health.is_paused or self._is_too_late():
            return []
        for order in orders:
            key = order.group, order.name
            if key in chosen or self._index.find(*key):
                continue
            try:
                if self._is_within_budget(order):
                    chosen[key] = order
            # If the ledger can't be saved, nothing may be written.
            except Exception as error:
                self.health.failed(error)
                break
        return list(chosen.values())

    def _try(self, *operations: Callable[[], object]) -> None:
        """Run disk operations in order. A failure skips the rest and begins a pause."""
        try:
            with self._timed_operation():
                for operation in operations:
                    operation()
        except Exception as error:
            # No error may end the thread, because waiting orders would keep their blocks forever.
            self.health.failed(error)
        else:
            self.health.record_success()

    @contextmanager
    def _timed_operation(self) -> Iterator[None]:
        """Record when an operation began, so that `check` can detect that it hangs."""
        self._since_s = self._clock()
        try:
            yield
        finally:
            self._since_s = None

    def _is_too_late(self) -> bool:
        return self._is_closed and self._clock() > self._give_up_s

    def _is_within_budget(self, order: StoreOrder) -> bool:
        num_bytes = record_bytes(self._pages.num_bytes_of([order]), len(order.tokens))
        if self._day_budget.spend(num_bytes):
            return True
        if self.num_over_budget == 0:
            logger.warning(
                "%s: the daily limit of written bytes is reached; blocks are not stored for now",
                self._store.path,
            )
        self.num_over_budget += 1
        self._out_of_budget_until_s = self._clock() + self._day_budget.wait_s(num_bytes)
        return False


def _check_order(order: StoreOrder) -> None:
    is_sound = (
        0 <= order.group < MAX_GROUPS
        and 0 < len(order.name) <= MAX_NAME_BYTES
        and len(order.parent) <= MAX_NAME_BYTES
        and len(order.tokens) <= MAX_TOKENS_BYTES
    )
    if not is_sound:
        raise ValueError(
            f"{order} can't be stored: a group must be below {MAX_GROUPS}, a name and a parent may"
            f" have {MAX_NAME_BYTES} bytes, and tokens {MAX_TOKENS_BYTES}"
        )
