"""Stores published contents in the tiers, after a short delay and while steps run.

Contents of groups that keep all tokens are stored at once. The blocks of a window or a snapshot are
often useless within a second, when their session has continued, so they are stored after a delay,
unless they were demoted. A block that is evicted before its store is ordered is not stored, so that
no sequence waits for a disk.

A tier evicts contents that are rarely loaded from it, and a content that stays in the pool is never
loaded. So a tier would evict popular prompt prefixes first. If a tier has evicted contents that a
sequence starts from, they are therefore stored again.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable
from math import inf

from quire.core.memory.block_pool import BlockPool
from quire.core.memory.eviction import ContentKey
from quire.core.memory.growth import Growth
from quire.core.memory.prefix_cache import PrefixCache
from quire.core.memory.tiers.contract import SOON_S, StoreOrder, Tiers
from quire.core.step import HOLE_BLOCK

# Seconds for which contents that may soon be useless wait, unless `delay_s` is set.
STORE_DELAY_S = 1.0

# Limit of stores in flight: a share of the pool's blocks, within an absolute range.
MAX_SHARE = 1 / 16
MAX_ORDERS = 256
MIN_ORDERS = 4

# Minimum seconds between orders while few contents wait (less than half of the most stores in
# flight). Orders make a step cost more, and small writes are inefficient.
BETWEEN_ORDERS_S = 0.05

# Maximum seconds that a running sequence waits for the store of a block that it needs.
LENT_S = 0.05


class WriteBehind:
    """The queue of contents to store, and the stores in flight.

    Invariant: each block in `in_flight` has one reference for its store. A block waits at most
    once, for its latest content, so the number of waiting contents is bounded even while tiers take
    no stores.
    """

    def __init__(
        self,
        tiers: Tiers,
        pool: BlockPool,
        cache: PrefixCache,
        growth: Growth,
        new_order: Callable[[], int],
    ) -> None:
        """new_order: returns a unique order id. Makes the pool collect published blocks."""
        #: The block of each store in flight, by order id.
        self.in_flight: dict[int, int] = {}
        #: Seconds for which contents of bounded groups wait before they are stored.
        self.delay_s = STORE_DELAY_S
        #: Number of stores that were carried out, of stores that ended without being carried out,
        #: and of blocks that were taken for other contents before their store was ordered.
        self.num_stored = self.num_not_stored = self.num_too_late = 0
        self._tiers = tiers
        self._pool = pool
        self._cache = cache
        self._new_order = new_order
        self._bounded = {rule.group for rule in growth.bounded}
        self._growing = {rule.group for rule in growth.growing}
        self._size = growth.block_size
        self._most = min(MAX_ORDERS, max(MIN_ORDERS, int(pool.num_blocks * MAX_SHARE)))
        self._storing: set[int] = set()  # blocks of stores in flight
        self._began_s: dict[int, float] = {}  # start of each store, by order
        self._given_up: dict[int, float] = {}  # time by which cancelled orders end unless they hang
        self._now_s = 0.0
        self._ordered_s = -inf
        # Block -> content, in the order of publication. `_ready` has contents to store now,
        # `_delayed` waiting contents, each with the time at which it becomes ready.
        self._ready: OrderedDict[int, ContentKey] = OrderedDict()
        self._delayed: OrderedDict[int, tuple[float, ContentKey]] = OrderedDict()
        pool.new_contents = []

    @property
    def num_waiting(self) -> int:
        """Number of published contents whose store was neither ordered nor dropped yet."""
        return len(self._ready) + len(self._delayed) + len(self._pool.new_contents or ())

    def num_ending(self, now_s: float) -> int:
        """Number of blocks that only a store holds, so that they are free when it has ended; leaves
        out stores that may hang."""
        counts, since_s, began_s = self._pool.ref_count, now_s - SOON_S, self._began_s
        until_s = self._given_up.get
        return sum(
            [
                counts[block] == 1
                and (began_s[order_id] >= since_s or until_s(order_id, -inf) >= now_s)
                for order_id, block in self.in_flight.items()
            ]
        )

    def orders(self, now_s: float, *, at_once: bool = False) -> list[StoreOrder]:
        """The stores to order now; each block is referenced from here on.

        at_once: order stores without the delay, because no content will be demoted any more.
        """
        self._now_s = now_s
        orders: list[StoreOrder] = []
        is_early = self._ordered_s <= now_s < self._ordered_s + BETWEEN_ORDERS_S
        if is_early and not at_once and self.num_waiting < self._most // 2:
            return orders
        self._collect_published(now_s)
        self._end_delays(now_s, at_once=at_once)
        if not self._ready or not self._tiers.takes_stores:
            return orders
        self._ordered_s = now_s
        while self._ready and len(self.in_flight) < self._most:
            block, key = self._ready.popitem(last=False)
            if self._pool.content[block] != key:
                self.num_too_late += 1
            elif self._pool.ref_count[block] and self._may_be_tail(key):
                # A fork may still append tokens to the block.
                self._delay(block, key, now_s)
            elif self._is_wanted(block, key):
                orders.append(self._order(block, key))
        return orders

    def store_again(self, blocks: Iterable[int]) -> None:
        """Store the contents of these blocks, from which sequences start, again if the tiers have
        lost them."""
        contents, find = self._pool.content, self._tiers.find
        for block in blocks:
            key = contents[block] if block != HOLE_BLOCK else None
            if key is None or find(*key) or block in self._ready or block in self._delayed:
                continue
            self._ready[block] = key

    def end(self, order_id: int, *, is_done: bool) -> None:
        """Handle the end of a store."""
        block = self.in_flight.pop(order_id)
        del self._began_s[order_id]
        self._given_up.pop(order_id, None)
        self._storing.discard(block)
        self._pool.release(block)
        self.num_stored += is_done
        self.num_not_stored += not is_done

    def cancel_last(self, count: int) -> None:
        """Cancel stores so that `count` blocks that only stores hold become free soon.

        Chooses among stores that were ordered a while ago, the newest first, since they have
        probably not begun.
        """
        assert count > 0, count
        counts, before_s = self._pool.ref_count, self._now_s - LENT_S
        late = [
            order_id
            for order_id, block in reversed(self.in_flight.items())
            if counts[block] == 1
            and self._began_s[order_id] <= before_s
            and order_id not in self._given_up
        ][:count]
        if late:
            self._tiers.cancel(late)
            self._given_up.update(dict.fromkeys(late, self._now_s + LENT_S))

    def clear(self) -> None:
        """Drop all contents that wait."""
        self._pool.new_contents = []
        self._ready.clear()
        self._delayed.clear()

    def _collect_published(self, now_s: float) -> None:
        blocks, self._pool.new_contents = self._pool.new_contents, []
        for block in blocks or ():
            key = self._pool.content[block]
            _, delayed = self._delayed.pop(block, (0.0, key))
            ready = self._ready.pop(block, key)
            self.num_too_late += (key is None) + (ready != key) + (delayed != key)
            if key is None:
                continue
            if key[0] in self._bounded:
                self._delay(block, key, now_s)
            else:
                self._ready[block] = key

    def _delay(self, block: int, key: ContentKey, now_s: float) -> None:
        self._delayed[block] = now_s + self.delay_s, key

    def _end_delays(self, now_s: float, *, at_once: bool) -> None:
        """Move contents that have waited long enough, or all, to the ready ones."""
        while self._delayed:
            block, (ready_s, key) = next(iter(self._delayed.items()))
            if ready_s > now_s and not at_once:
                return
            del self._delayed[block]
            self._ready[block] = key

    def _may_be_tail(self, key: ContentKey) -> bool:
        """Whether the block may be partly filled.

        Its length is unknown if a window's block has outlived the block of the main group.
        """
        group, name = key
        if group not in self._growing:
            return False
        length = self._cache.num_tokens(name)
        return length is None or length < self._size

    def _is_wanted(self, block: int, key: ContentKey) -> bool:
        return (
            block not in self._storing
            and block not in self._pool.demoted
            and not self._tiers.find(*key)
        )

    def _order(self, block: int, key: ContentKey) -> StoreOrder:
        self._pool.share(block, is_use=False)
        order_id = self._new_order()
        self.in_flight[order_id] = block
        self._began_s[order_id] = self._now_s
        self._storing.add(block)
        tail = self._cache.tail(key[1])
        if tail is None:
            return StoreOrder(order_id, block, *key)
        parent, tokens = tail
        return StoreOrder(order_id, block, *key, parent, tokens)
