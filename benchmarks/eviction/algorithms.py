"""The known eviction algorithms that the engine's own is compared with, over keys.

Each is as its paper has it, at blocks of equal size, with what a KV cache asks for: a block that
a running request holds can't be evicted, a use counts when the request ends (so that of equal
blocks the tail of a chain goes first), and nothing is refused admission. Sizes of lists are parts
of the pool. Clear rather than fast; used by `study` alone.
"""

import heapq
from abc import ABC, abstractmethod
from collections import Counter, OrderedDict, deque

from benchmarks.eviction.traces import Access

Keys = OrderedDict[int, None]


def pop_first(keys: Keys) -> int:
    """Remove the key that was put in first."""
    return keys.popitem(last=False)[0]


class Algorithm(ABC):
    """The cached and the held contents. Subclasses order the free contents."""

    def __init__(self, num_blocks: int, accesses: list[Access]) -> None:
        self.num_blocks = num_blocks
        self.num_free = num_blocks
        self._num_holders: Counter[int] = Counter()
        self._cached: set[int] = set()

    def __contains__(self, key: int) -> bool:
        return key in self._cached

    def hold(self, key: int) -> None:
        """One more running request uses a cached content."""
        if not self._num_holders[key]:
            self.num_free -= 1
            self.leave(key)
        self._num_holders[key] += 1

    def insert(self, keys: list[int]) -> None:
        """Compute contents that are not cached, and hold them."""
        for key in keys:
            if len(self._cached) == self.num_blocks:
                self._cached.remove(self.evict())
            self._cached.add(key)
            self._num_holders[key] = 1
            self.num_free -= 1

    def release(self, key: int, depth: int) -> None:
        """A request that used the content, as its block number `depth`, has ended."""
        self._num_holders[key] -= 1
        if not self._num_holders[key]:
            self.num_free += 1
            self.enter(key, depth)

    @abstractmethod
    def enter(self, key: int, depth: int) -> None:
        """A content was used, for the first time or again, and is free now."""

    @abstractmethod
    def leave(self, key: int) -> None:
        """A free content is used again; `enter` follows."""

    @abstractmethod
    def evict(self) -> int:
        """Choose and forget a free content."""


class Lru(Algorithm):
    """Least recently used first."""

    def __init__(self, num_blocks: int, accesses: list[Access]) -> None:
        super().__init__(num_blocks, accesses)
        self._keys = Keys()

    def enter(self, key: int, depth: int) -> None:
        self._keys[key] = None

    def leave(self, key: int) -> None:
        del self._keys[key]

    def evict(self) -> int:
        return pop_first(self._keys)


class Slru(Algorithm):
    """Segmented LRU (Karedla, Love, Wherry, 1994): 80% are protected, for contents used again."""

    PROTECTED = 0.8

    def __init__(self, num_blocks: int, accesses: list[Access]) -> None:
        super().__init__(num_blocks, accesses)
        self._probation, self._protected = Keys(), Keys()
        self._again: set[int] = set()

    def enter(self, key: int, depth: int) -> None:
        if key not in self._again:
            self._probation[key] = None
            return
        self._again.remove(key)
        self._protected[key] = None
        if len(self._protected) > self.PROTECTED * self.num_blocks:
            self._probation[pop_first(self._protected)] = None

    def leave(self, key: int) -> None:
        self._again.add(key)
        del (self._protected if key in self._protected else self._probation)[key]

    def evict(self) -> int:
        return pop_first(self._probation or self._protected)


class Ranked(Algorithm):
    """Evicts the smallest `value`, which is set when a content is used; then the oldest."""

    def __init__(self, num_blocks: int, accesses: list[Access]) -> None:
        super().__init__(num_blocks, accesses)
        self.now = 0
        self._heap: list[tuple[float, int, int]] = []
        self._entries: dict[int, tuple[float, int, int]] = {}

    def enter(self, key: int, depth: int) -> None:
        self.now += 1
        entry = self._entries[key] = (self.value(key, depth), self.now, key)
        heapq.heappush(self._heap, entry)

    def leave(self, key: int) -> None:
        del self._entries[key]

    def evict(self) -> int:
        while True:
            entry = heapq.heappop(self._heap)
            value, _, key = entry
            if self._entries.get(key) is entry:
                del self._entries[key]
                self.evicted(key, value)
                return key

    @abstractmethod
    def value(self, key: int, depth: int) -> float:
        """The value of a content that has just been used."""

    def evicted(self, key: int, value: float) -> None:
        """A content of that value was evicted."""


class Belady(Ranked):
    """Foresees: evicts what is used again last (Belady, 1966).

    A block's next use is never later than that of the blocks after it in its chain, so it evicts
    tails before heads and no prefix has a gap. Blocks cost the same, all of a request are inserted:
    so no order has more hits, except for what held blocks and coinciding arrivals distort.
    """

    def __init__(self, num_blocks: int, accesses: list[Access]) -> None:
        super().__init__(num_blocks, accesses)
        self._uses: dict[int, deque[int]] = {}
        for number, access in enumerate(accesses):
            for key in access.block_ids:
                self._uses.setdefault(key, deque()).append(number)
        self._never = len(accesses)

    def hold(self, key: int) -> None:
        self._uses[key].popleft()
        super().hold(key)

    def insert(self, keys: list[int]) -> None:
        for key in keys:
            self._uses[key].popleft()
        super().insert(keys)

    def value(self, key: int, depth: int) -> float:
        uses = self._uses[key]
        return -float(uses[0] if uses else self._never)


class Lru2(Ranked):
    """LRU-2 (O'Neil, O'Neil, Weikum, 1993): by the last use but one.

    Uses are remembered for GHOSTS times as many evicted contents as there are blocks.
    """

    GHOSTS = 1

    def __init__(self, num_blocks: int, accesses: list[Access]) -> None:
        super().__init__(num_blocks, accesses)
        self._last: dict[int, int] = {}
        self._ghosts = Keys()

    def value(self, key: int, depth: int) -> float:
        self._ghosts.pop(key, None)
        before, self._last[key] = self._last.get(key, 0), self.now
        return before

    def evicted(self, key: int, value: float) -> None:
        self._ghosts[key] = None
        if len(self._ghosts) > self.GHOSTS * self.num_blocks:
            del self._last[pop_first(self._ghosts)]


class LfuAgeing(Ranked):
    """LFU with dynamic ageing (Arlitt et al., 1999): uses, plus the value evicted last."""

    def __init__(self, num_blocks: int, accesses: list[Access]) -> None:
        super().__init__(num_blocks, accesses)
        self._num_uses: Counter[int] = Counter()
        self._age = 0.0

    def value(self, key: int, depth: int) -> float:
        self._num_uses[key] += 1
        return self._age + self._num_uses[key]

    def evicted(self, key: int, value: float) -> None:
        self._age = value
        del self._num_uses[key]


class LfuGhosts(LfuAgeing):
    """A variant that remembers uses as `Lru2` does."""

    GHOSTS = 1

    def __init__(self, num_blocks: int, accesses: list[Access]) -> None:
        super().__init__(num_blocks, accesses)
        self._ghosts = Keys()

    def value(self, key: int, depth: int) -> float:
        self._ghosts.pop(key, None)
        return super().value(key, depth)

    def evicted(self, key: int, value: float) -> None:
        self._age = value
        self._ghosts[key] = None
        if len(self._ghosts) > self.GHOSTS * self.num_blocks:
            del self._num_uses[pop_first(self._ghosts)]


class Gdsf(LfuAgeing):
    """Greedy-dual-size-frequency (Cherkasova, 1998): uses times the cost of computing a block.

    All blocks have one size. The cost grows with the depth in the chain, as attention does: by 2%
    of a block's other work for each 512 tokens before it (about what a model of 7B parameters has).
    """

    COST_OF_DEPTH = 0.02

    def value(self, key: int, depth: int) -> float:
        self._num_uses[key] += 1
        return self._age + self._num_uses[key] * (1 + self.COST_OF_DEPTH * depth)


class Arc(Algorithm):
    """Adaptive replacement (Megiddo, Modha, FAST 2003)."""

    def __init__(self, num_blocks: int, accesses: list[Access]) -> None:
        super().__init__(num_blocks, accesses)
        self._once, self._often = Keys(), Keys()
        self._once_ghosts, self._often_ghosts = Keys(), Keys()
        self._again: set[int] = set()
        self._target = 0.0  # of the contents used once

    def enter(self, key: int, depth: int) -> None:
        once, often = self._once_ghosts, self._often_ghosts
        target = self._often
        if key in self._again:
            self._again.remove(key)
        elif key in once:
            step = max(1.0, len(often) / len(once))
            self._target = min(float(self.num_blocks), self._target + step)
            del once[key]
        elif key in often:
            step = max(1.0, len(once) / len(often))
            self._target = max(0.0, self._target - step)
            del often[key]
        else:
            target = self._once
        target[key] = None
        while once and len(self._once) + len(once) > self.num_blocks:
            pop_first(once)
        while often and len(often) + len(once) > self.num_blocks:
            pop_first(often)

    def leave(self, key: int) -> None:
        self._again.add(key)
        del (self._once if key in self._once else self._often)[key]

    def evict(self) -> int:
        is_once = bool(self._once) and (len(self._once) > self._target or not self._often)
        key = pop_first(self._once if is_once else self._often)
        (self._once_ghosts if is_once else self._often_ghosts)[key] = None
        return key


class S3Fifo(Algorithm):
    """S3-FIFO (Yang et al., SOSP 2023): a small queue for new contents, 10%, a main one, ghosts.

    Contents keep their places while held, and are passed over.
    """

    GHOSTS = 1

    SMALL = 0.1
    MOST_USES = 3

    def __init__(self, num_blocks: int, accesses: list[Access]) -> None:
        super().__init__(num_blocks, accesses)
        self._small, self._main, self._ghosts = Keys(), Keys(), Keys()
        self._num_uses: dict[int, int] = {}
        self._held: set[int] = set()
        self._num_held_small = 0

    def enter(self, key: int, depth: int) -> None:
        if key in self._held:
            self._held.remove(key)
            self._num_held_small -= key in self._small
            return
        self._num_uses[key] = 0
        queue = self._main if key in self._ghosts else self._small
        self._ghosts.pop(key, None)
        queue[key] = None

    def leave(self, key: int) -> None:
        self._held.add(key)
        self._num_held_small += key in self._small
        self._num_uses[key] = min(self.MOST_USES, self._num_uses[key] + 1)

    def evict(self) -> int:
        while True:
            is_small = self._takes_small()
            queue = self._small if is_small else self._main
            key = pop_first(queue)
            if key in self._held:
                queue[key] = None
            elif self._num_uses[key]:
                self._num_uses[key] = 0 if is_small else self._num_uses[key] - 1
                self._main[key] = None
            else:
                self._forget(key, is_small)
                return key

    def _takes_small(self) -> bool:
        num_held_main = len(self._held) - self._num_held_small
        if len(self._main) == num_held_main:
            return True
        is_due = len(self._small) >= self.SMALL * self.num_blocks
        return is_due and len(self._small) > self._num_held_small

    def _forget(self, key: int, is_small: bool) -> None:
        del self._num_uses[key]
        if is_small:
            self._ghosts[key] = None
            if len(self._ghosts) > self.GHOSTS * self.num_blocks:
                pop_first(self._ghosts)


class Clock(Algorithm):
    """Second chance (Corbato, 1968): first in, first out, but once more if used meanwhile."""

    def __init__(self, num_blocks: int, accesses: list[Access]) -> None:
        super().__init__(num_blocks, accesses)
        self._keys = Keys()
        self._used: set[int] = set()
        self._held: set[int] = set()

    def enter(self, key: int, depth: int) -> None:
        self._held.discard(key)
        self._keys.setdefault(key)

    def leave(self, key: int) -> None:
        self._held.add(key)
        self._used.add(key)

    def evict(self) -> int:
        while True:
            key = pop_first(self._keys)
            if key not in self._held and key not in self._used:
                return key
            if key not in self._held:
                self._used.remove(key)
            self._keys[key] = None


class WTinyLfu(Algorithm):
    """W-TinyLFU (Einziger, Friedman, Manes, 2017): a window of 1%, then a segmented LRU.

    What leaves the window replaces the main part's next victim if it was used more often. Uses are
    counted exactly instead of in a sketch, up to 15, and halved every 10 * num_blocks of them.
    A request brings many blocks at once, which are held before they enter the window. So all that
    is in the window then has to leave, and where that is not enough the main part gives up blocks;
    it grows back by those that win, not by whatever comes next.
    """

    WINDOW = 0.01
    MOST_USES = 15

    def __init__(self, num_blocks: int, accesses: list[Access]) -> None:
        super().__init__(num_blocks, accesses)
        self._window, self._probation, self._protected = Keys(), Keys(), Keys()
        self._max_window = max(1, int(self.WINDOW * num_blocks))
        self._max_protected = int(Slru.PROTECTED * (num_blocks - self._max_window))
        self._num_uses: Counter[int] = Counter()
        self._sample = 0
        self._place: dict[int, Keys] = {}
        self._is_filled = False

    def enter(self, key: int, depth: int) -> None:
        self._count(key)
        self._put(key, self._place.get(key, self._window))
        if len(self._protected) > self._max_protected:
            self._put(pop_first(self._protected), self._probation)

    def leave(self, key: int) -> None:
        place = self._place[key]
        del place[key]
        if place is self._probation:
            self._place[key] = self._protected

    def evict(self) -> int:
        max_main = self.num_blocks - self._max_window
        while not self._is_filled and self._window and self._num_in_main() < max_main:
            self._put(pop_first(self._window), self._probation)
        self._is_filled = True
        while self._window:
            candidate = pop_first(self._window)
            main = self._probation or self._protected
            victim = next(iter(main), candidate)
            if self._num_uses[candidate] <= self._num_uses[victim]:
                return self._forget(candidate)
            self._put(candidate, self._probation)
            if self._num_in_main() > max_main:
                del main[victim]
                return self._forget(victim)
        return self._forget(pop_first(self._probation or self._protected))

    def _num_in_main(self) -> int:
        return len(self._place) - len(self._window)

    def _forget(self, key: int) -> int:
        del self._place[key]
        return key

    def _put(self, key: int, place: Keys) -> None:
        place[key] = None
        self._place[key] = place

    def _count(self, key: int) -> None:
        self._num_uses[key] = min(self.MOST_USES, self._num_uses[key] + 1)
        self._sample += 1
        if self._sample >= 10 * self.num_blocks:
            self._sample //= 2
            halves = {key: uses // 2 for key, uses in self._num_uses.items() if uses > 1}
            self._num_uses = Counter(halves)


class Lru2Long(Lru2):
    """With as long a memory of evicted contents as the engine's order has at most."""

    GHOSTS = 4


class LfuGhostsLong(LfuGhosts):
    """With as long a memory of evicted contents as the engine's order has at most."""

    GHOSTS = 4


class S3FifoLong(S3Fifo):
    """With as long a memory of evicted contents as the engine's order has at most."""

    GHOSTS = 4


ALGORITHMS: dict[str, type[Algorithm]] = {
    "belady": Belady,
    "lru": Lru,
    "clock": Clock,
    "slru": Slru,
    "lru-2": Lru2,
    "lfu-ageing": LfuAgeing,
    "lfu-ghosts": LfuGhosts,
    "gdsf": Gdsf,
    "arc": Arc,
    "s3-fifo": S3Fifo,
    "w-tinylfu": WTinyLfu,
    "lru-2-4x": Lru2Long,
    "lfu-ghosts-4x": LfuGhostsLong,
    "s3-fifo-4x": S3FifoLong,
}
