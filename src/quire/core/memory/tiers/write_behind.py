"""Stores what is published in the tiers, a little later and beside the steps.

What a full group publishes is worth storing at once. A window's run or a snapshot is often dead
within a second, when its session has gone on: those wait, and are stored if they are not demoted by
then. A block that is evicted first is not stored: nothing waits for a disk.
"""

from collections import deque
from collections.abc import Callable

from quire.core.memory.block_pool import BlockPool
from quire.core.memory.eviction import ContentKey
from quire.core.memory.growth import Growth
from quire.core.memory.prefix_cache import PrefixCache
from quire.core.memory.tiers.contract import StoreOrder, Tiers

# Contents that may soon be dead weight wait for so long, unless `settle_s` says otherwise.
SETTLE_S = 1.0

# So many stores are under way at most: of the pool, and in all.
MAX_SHARE = 1 / 16
MAX_ORDERS = 256
MIN_ORDERS = 4


class WriteBehind:
    """What waits to be stored, and what is being stored.

    num_stored, num_not_stored: orders by how they ended. num_too_late: blocks that were taken for
    other contents before they could be ordered.

    Invariant: each block in `in_flight`, by order, has one reference for it.
    """

    def __init__(
        self,
        tiers: Tiers,
        pool: BlockPool,
        cache: PrefixCache,
        growth: Growth,
        new_order: Callable[[], int],
    ) -> None:
        """new_order: a number that no other order has. Has the pool note what is published."""
        self.in_flight: dict[int, int] = {}
        self.settle_s = SETTLE_S
        self.num_stored = self.num_not_stored = self.num_too_late = 0
        self._tiers = tiers
        self._pool = pool
        self._cache = cache
        self._new_order = new_order
        self._bounded = {rule.group for rule in growth.bounded}
        self._size = growth.block_size
        self._most = min(MAX_ORDERS, max(MIN_ORDERS, int(pool.num_blocks * MAX_SHARE)))
        self._ready: deque[tuple[int, ContentKey]] = deque()
        self._settling: deque[tuple[float, int, ContentKey]] = deque()
        pool.new_contents = []

    @property
    def num_waiting(self) -> int:
        """Contents that were published and neither stored nor given up yet."""
        return len(self._ready) + len(self._settling) + len(self._pool.new_contents or ())

    def orders(self, now_s: float, *, at_once: bool = False) -> list[StoreOrder]:
        """What is to be stored now; each block is referenced from here on.

        at_once: nothing will be demoted any more.
        """
        self._take_in(now_s)
        while self._settling and (at_once or self._settling[0][0] <= now_s):
            _, block, key = self._settling.popleft()
            self._ready.append((block, key))
        orders: list[StoreOrder] = []
        if not self._tiers.takes_stores:
            return orders
        while self._ready and len(self.in_flight) < self._most:
            block, key = self._ready.popleft()
            if self._pool.content[block] != key:
                self.num_too_late += 1
            elif self._cache.tail(key[1]) is not None and self._pool.ref_count[block]:
                # A fork may yet write behind its tokens.
                self._settling.append((now_s + self.settle_s, block, key))
            elif block not in self._pool.demoted and not self._tiers.find(*key):
                orders.append(self._order(block, key))
        return orders

    def end(self, order_id: int, *, is_done: bool) -> None:
        """A store has ended."""
        self._pool.release(self.in_flight.pop(order_id))
        self.num_stored += is_done
        self.num_not_stored += not is_done

    def clear(self) -> None:
        """Give up what waits."""
        self._pool.new_contents = []
        self._ready.clear()
        self._settling.clear()

    def _take_in(self, now_s: float) -> None:
        blocks, self._pool.new_contents = self._pool.new_contents, []
        for block in blocks or ():
            key = self._pool.content[block]
            if key is None:
                self.num_too_late += 1
            elif key[0] in self._bounded:
                self._settling.append((now_s + self.settle_s, block, key))
            else:
                self._ready.append((block, key))

    def _order(self, block: int, key: ContentKey) -> StoreOrder:
        self._pool.share(block, is_use=False)
        order_id = self._new_order()
        self.in_flight[order_id] = block
        tail = self._cache.tail(key[1])
        if tail is None:
            return StoreOrder(order_id, block, *key)
        parent, tokens = tail
        return StoreOrder(order_id, block, *key, parent, tokens)
