"""Stores what is published in the tiers, a little later and beside the steps.

What a full group publishes is worth storing at once. A window's run or a snapshot is often dead
within a second, when its session has gone on: those wait, and are stored if they are not demoted by
then. A block that is evicted first is not stored: nothing waits for a disk.

A tier forgets by itself, and what stays in the pool is never asked of it: so a prompt that all
begin with would be gone there first. Contents that a sequence goes on from are stored again then.
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

# Contents that may soon be dead weight wait for so long, unless `settle_s` says otherwise.
SETTLE_S = 1.0

# So many stores are under way at most: of the pool, and in all.
MAX_SHARE = 1 / 16
MAX_ORDERS = 256
MIN_ORDERS = 4

# Where fewer wait than half of what may be under way, orders go out so far apart: a step that has
# some costs more, and so does a small write.
BETWEEN_ORDERS_S = 0.05

# A running sequence that needs a free block waits for its store so long at most.
LENT_S = 0.05


class WriteBehind:
    """What waits to be stored, and what is being stored.

    num_stored, num_not_stored: orders by how they ended. num_too_late: blocks that were taken for
    other contents before they could be ordered.

    Invariant: each block in `in_flight`, by order, has one reference for it. A block waits at most
    once, for its latest content: so what waits is bounded also while nothing is taken.
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
        self._growing = {rule.group for rule in growth.growing}
        self._size = growth.block_size
        self._most = min(MAX_ORDERS, max(MIN_ORDERS, int(pool.num_blocks * MAX_SHARE)))
        self._storing: set[int] = set()  # the blocks in flight
        self._began_s: dict[int, float] = {}  # when, by order
        self._given_up: dict[int, float] = {}  # until when they end, by order, unless they hang
        self._now_s = 0.0
        self._ordered_s = -inf
        # By block, in the order in which they came; of those that settle, from when on too.
        self._ready: OrderedDict[int, ContentKey] = OrderedDict()
        self._settling: OrderedDict[int, tuple[float, ContentKey]] = OrderedDict()
        pool.new_contents = []

    @property
    def num_waiting(self) -> int:
        """Contents that were published and neither stored nor given up yet."""
        return len(self._ready) + len(self._settling) + len(self._pool.new_contents or ())

    def num_ending(self, now_s: float) -> int:
        """Blocks that only a store holds: free when it has ended; not where that may hang."""
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
        """What is to be stored now; each block is referenced from here on.

        at_once: nothing will be demoted any more.
        """
        self._now_s = now_s
        orders: list[StoreOrder] = []
        is_early = self._ordered_s <= now_s < self._ordered_s + BETWEEN_ORDERS_S
        if is_early and not at_once and self.num_waiting < self._most // 2:
            return orders
        self._take_in(now_s)
        self._end_settling(now_s, at_once=at_once)
        if not self._ready or not self._tiers.takes_stores:
            return orders
        self._ordered_s = now_s
        while self._ready and len(self.in_flight) < self._most:
            block, key = self._ready.popitem(last=False)
            if self._pool.content[block] != key:
                self.num_too_late += 1
            elif self._pool.ref_count[block] and self._may_be_tail(key):
                # A fork may yet write behind its tokens.
                self._settle(block, key, now_s)
            elif self._is_wanted(block, key):
                orders.append(self._order(block, key))
        return orders

    def store_again(self, blocks: Iterable[int]) -> None:
        """These were found in the pool, and are used."""
        contents, find = self._pool.content, self._tiers.find
        for block in blocks:
            key = contents[block] if block != HOLE_BLOCK else None
            if key is None or find(*key) or block in self._ready or block in self._settling:
                continue
            self._ready[block] = key

    def end(self, order_id: int, *, is_done: bool) -> None:
        """A store has ended."""
        block = self.in_flight.pop(order_id)
        del self._began_s[order_id]
        self._given_up.pop(order_id, None)
        self._storing.discard(block)
        self._pool.release(block)
        self.num_stored += is_done
        self.num_not_stored += not is_done

    def give_up(self, count: int) -> None:
        """So many blocks that only stores hold are needed now: of those that were ordered a while
        ago, the last, which have hardly begun, end soon and undone."""
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
        """Give up what waits."""
        self._pool.new_contents = []
        self._ready.clear()
        self._settling.clear()

    def _take_in(self, now_s: float) -> None:
        blocks, self._pool.new_contents = self._pool.new_contents, []
        for block in blocks or ():
            key = self._pool.content[block]
            _, settling = self._settling.pop(block, (0.0, key))
            ready = self._ready.pop(block, key)
            self.num_too_late += (key is None) + (ready != key) + (settling != key)
            if key is None:
                continue
            if key[0] in self._bounded:
                self._settle(block, key, now_s)
            else:
                self._ready[block] = key

    def _settle(self, block: int, key: ContentKey, now_s: float) -> None:
        self._settling[block] = now_s + self.settle_s, key

    def _end_settling(self, now_s: float, *, at_once: bool) -> None:
        """Those that have settled, or all, are ready."""
        while self._settling:
            block, (ready_s, key) = next(iter(self._settling.items()))
            if ready_s > now_s and not at_once:
                return
            del self._settling[block]
            self._ready[block] = key

    def _may_be_tail(self, key: ContentKey) -> bool:
        """Whether it is partly filled, as far as is known: a window's block may outlive the one of
        the group that knows."""
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
