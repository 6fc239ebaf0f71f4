"""Eviction orders: which cached content is overwritten first.

An order sorts block ids, and reads their content keys and use counts; it uses no reference counts,
tokens or clocks. Only `block_pool` calls it. Every operation costs O(1) amortized per block.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from quire.registry import Registry

NUM_CLASSES = 2
NUM_BINS = 9
MAX_AGE = 1 << (NUM_BINS - 1)
"""Age, in epochs, at which a sample is dropped as not reused."""

PRIOR = (0.1, 0.3)
"""Prior share of contents that are reused in each bin, by class. Bins double in width, so equal
shares mean a reuse rate that falls as 1 / age: until samples arrive, each class is in LRU order."""
PRIOR_WEIGHT = 8.0
"""Number of observed contents that weigh as much as the prior."""
HALF_LIFE = 256
"""Epochs after which an observation counts half."""


def bin_of(age: int) -> int:
    """Index of the bin that an age in epochs falls into; the last bin has no upper bound."""
    return min(age.bit_length(), NUM_BINS - 1)


class ReuseCurve:
    """Estimates how likely a content is to be used again, by its age, with a life table.

    Contents come in two classes: not reused so far, and reused at least once. Ages are counted in
    epochs (a fixed number of evictions: a clock that only memory pressure moves) and binned by
    octaves, [0, 1), [1, 2), [2, 4), ... For each class and bin, the curve estimates how many of the
    contents that reached the bin's age unused were reused within the bin.

    Invariant: `_waiting[-1 - age][c]` samples of class c are `age` epochs old and neither reused
    nor dropped; each sample was counted once in `_reached[c]`, for every bin up to the bin of its
    age.
    """

    def __init__(self) -> None:
        self.epoch = 0
        self._waiting: deque[list[int]] = deque([[0] * NUM_CLASSES], maxlen=MAX_AGE + 1)
        self._reached = [[0.0] * NUM_BINS for _ in range(NUM_CLASSES)]
        self._reused = [[0.0] * NUM_BINS for _ in range(NUM_CLASSES)]

    def start(self, reuse_class: int) -> None:
        """Start a sample: a content of this class was used just now."""
        self._waiting[-1][reuse_class] += 1
        self._reached[reuse_class][0] += 1

    def record_reuse(self, reuse_class: int, epoch: int) -> None:
        """Record that a sample started at `epoch`, at most MAX_AGE epochs ago, is used again."""
        age = self.epoch - epoch
        self._waiting[-1 - age][reuse_class] -= 1
        self._reused[reuse_class][bin_of(age)] += 1

    def next_epoch(self) -> None:
        """Make all samples one epoch older. O(NUM_BINS)."""
        self.epoch += 1
        self._waiting.append([0] * NUM_CLASSES)
        for index in range(1, NUM_BINS):
            age = 1 << (index - 1)
            if age < len(self._waiting):
                for reached, waiting in zip(self._reached, self._waiting[-1 - age], strict=True):
                    reached[index] += waiting
        if self.epoch % HALF_LIFE == 0:
            self._reached = [[value / 2 for value in row] for row in self._reached]
            self._reused = [[value / 2 for value in row] for row in self._reused]

    def densities(self) -> list[list[float]]:
        """Expected hits per epoch for which a block is kept, by class and bin of its age.

        Each value is the maximum over all bins at whose end the block may be evicted (a Gittins
        index), so a content that is usually reused only after a while is worth keeping until then.
        Cf. Beckmann, Chen, Cidon, "LHD", NSDI 2018, section 3, which takes the mean over the whole
        life instead.
        """
        return [
            [_density(parts, first) for first in range(NUM_BINS)]
            for parts in (self._parts_reused(index) for index in range(NUM_CLASSES))
        ]

    def _parts_reused(self, reuse_class: int) -> list[float]:
        prior = PRIOR[reuse_class] * PRIOR_WEIGHT
        return [
            (reused + prior) / (reached + PRIOR_WEIGHT)
            for reused, reached in zip(
                self._reused[reuse_class], self._reached[reuse_class], strict=True
            )
        ]


def _density(parts: list[float], first: int) -> float:
    """Largest ratio of hits to epochs that a block stays, over bins first..last, for any choice of
    last."""
    best = num_hits = num_epochs = 0.0
    left = 1.0
    for index in range(first, NUM_BINS):
        width = 1 << max(index - 1, 0)
        num_hits += left * parts[index]
        num_epochs += left * width * (1 - parts[index] / 2)  # a hit comes in mid-bin on average
        left *= 1 - parts[index]
        best = max(best, num_hits / num_epochs)
    return best


ContentKey = tuple[int, bytes]
"""(KV group, content hash)."""


class EvictionOrder(Protocol):
    """The free blocks with content, in the order in which they are taken.

    The pool releases the tail of a chain first. Among blocks of equal rank, an order takes the
    block released first, so the tails of chains are evicted before their heads.
    """

    def add(self, blocks: Sequence[int]) -> None:
        """Add blocks with content that were just freed, in this order."""
        ...

    def revive(self, block: int) -> None:
        """Remove a block that is used again."""
        ...

    def drop(self, block: int) -> None:
        """Remove a block that is not used again: its content is forgotten or pinned."""
        ...

    def take(self, count: int, evicted: list[ContentKey]) -> list[int]:
        """Remove the first `count` blocks; the order has at least that number.

        Their content keys move to the end of `evicted`.
        """
        ...

    def recall(self, digests: Sequence[bytes]) -> list[bool]:
        """Return for each of these contents, just computed and in chain order, whether it was
        evicted recently."""
        ...

    def block_ids(self) -> list[int]:
        """All blocks in the order in which they would be taken. O(blocks); for checks."""
        ...


OrderFactory = Callable[[int, list[ContentKey | None], list[int]], EvictionOrder]
"""(num_blocks, content key by block, number of uses by block) -> order. The lists belong to the
pool; an order reads them, and clears the keys of the blocks that it hands out."""


class _Queues:
    """Queues of block ids: intrusive circular linked lists, each with its own sentinel.

    Invariant: a block is in at most one queue. Unlinking a block does not need its queue, and two
    queues are joined by changing four links.
    """

    def __init__(self, num_blocks: int) -> None:
        self.following = list(range(num_blocks))
        self.previous = list(range(num_blocks))
        self._spare: list[int] = []

    def new(self) -> int:
        """The sentinel of an empty queue."""
        if self._spare:
            return self._spare.pop()
        self.following.append(len(self.following))
        self.previous.append(len(self.previous))
        return len(self.following) - 1

    def discard(self, queue: int) -> None:
        """Delete an empty queue; its sentinel is reused."""
        self._spare.append(queue)

    def append(self, queue: int, block: int) -> None:
        """Put a block at a queue's end."""
        following, previous = self.following, self.previous
        last = previous[queue]
        following[last] = block
        previous[block] = last
        following[block] = queue
        previous[queue] = block

    def unlink(self, block: int) -> None:
        """Take a block out of its queue."""
        before, after = self.previous[block], self.following[block]
        self.following[before] = after
        self.previous[after] = before

    def take(
        self, queue: int, count: int, content: list[ContentKey | None], evicted: list[ContentKey]
    ) -> list[int]:
        """Remove up to `count` blocks from a queue's front; their keys move to `evicted`."""
        taken: list[int] = []
        following = self.following
        block = following[queue]
        for _ in range(count):
            if block == queue:
                break
            taken.append(block)
            key = content[block]
            assert key is not None
            evicted.append(key)
            content[block] = None
            block = following[block]
        following[queue] = block
        self.previous[block] = queue
        return taken

    def move_all(self, source: int, target: int) -> None:
        """Append all blocks of one queue to another, in O(1)."""
        first, last = self.following[source], self.previous[source]
        if first == source:
            return
        end = self.previous[target]
        self.following[end] = first
        self.previous[first] = end
        self.following[last] = target
        self.previous[target] = last
        self.following[source] = self.previous[source] = source

    def block_ids(self, queue: int) -> list[int]:
        """A queue's blocks from the front."""
        ids: list[int] = []
        block = self.following[queue]
        while block != queue:
            ids.append(block)
            block = self.following[block]
        return ids


class LruOrder:
    """Least recently used first: one queue, in the order of release."""

    def __init__(
        self, num_blocks: int, content: list[ContentKey | None], num_uses: list[int]
    ) -> None:
        self._queues = _Queues(num_blocks)
        self._queue = self._queues.new()
        self._content = content
        # Bound directly, since a wrapping method would double the cost.
        self.revive = self.drop = self._queues.unlink

    def add(self, blocks: Sequence[int]) -> None:
        """Append the blocks at the end of the queue."""
        for block in blocks:
            self._queues.append(self._queue, block)

    def take(self, count: int, evicted: list[ContentKey]) -> list[int]:
        """Take from the least recently released block on."""
        return self._queues.take(self._queue, count, self._content, evicted)

    def recall(self, digests: Sequence[bytes]) -> list[bool]:
        """Evicted contents are not remembered."""
        return [False] * len(digests)

    def block_ids(self) -> list[int]:
        """All blocks from the least recently released to the last."""
        return self._queues.block_ids(self._queue)


@dataclass(slots=True)
class _AgeSpan:
    """A queue of blocks of one class, which were last released within one span of epochs."""

    queue: int
    num_epochs: int
    newest_epoch: int


EPOCHS_PER_POOL = 8
MIN_EPOCH = 256
"""Evictions in an epoch: an eighth of the pool's blocks, but at least MIN_EPOCH, which bounds the
cost of an epoch's end for each eviction."""
EPOCHS_PER_LESSON = 4
"""Epochs between two computations of the densities from the reuse curve."""
SAMPLE_EVERY = 16
"""The reuse curve samples one in this many released blocks, chosen by id."""
GHOSTS_PER_BLOCK = 2
"""Number of evicted contents that each of two generations remembers per block of the pool. A
remembered content takes about 100 bytes."""


class HitDensityOrder:
    """Takes first the blocks with the fewest expected hits for the time that they stay.

    Free blocks are queued by class (reused so far, or not) and by age. Blocks are taken from the
    queue with the lowest hit density (see `ReuseCurve.densities`), the least recently released
    first. So contents that were reused are kept longer than contents used once. If the pool is too
    small to hold new contents until they are reused (a user thinks before the next turn), the
    oldest contents stay and the newest are evicted.

    Ages need no work per block: a queue is closed with its epoch, and of every three closed queues
    of equal width the two oldest are joined (an exponential histogram: Datar et al., SODA 2002). So
    there are a few dozen queues, ranked once an epoch. The order remembers the keys of recently
    evicted contents, two to four times as many as the pool has blocks. A remembered content counts
    as reused when it is computed again.

    Invariant: `_ranking` lists all queues, and the closed ones before `_position` are empty.
    """

    def __init__(
        self, num_blocks: int, content: list[ContentKey | None], num_uses: list[int]
    ) -> None:
        self._content = content
        self._num_uses = num_uses
        self._queues = _Queues(num_blocks)
        self._following = self._queues.following
        self._previous = self._queues.previous
        self._curve = ReuseCurve()
        # Sampled contents, least recently used first: digest -> (class, epoch of last use).
        self._samples: OrderedDict[bytes, tuple[int, int]] = OrderedDict()
        # Two generations of evicted contents; the older is dropped when the younger is full.
        self._young_ghosts: set[bytes] = set()
        self._old_ghosts: set[bytes] = set()
        self._ghosts_per_generation = GHOSTS_PER_BLOCK * num_blocks
        self._epoch_length = max(MIN_EPOCH, num_blocks // EPOCHS_PER_POOL)
        self._num_left_in_epoch = self._epoch_length
        self._current = [self._queues.new() for _ in range(NUM_CLASSES)]
        self._closed: list[list[_AgeSpan]] = [[] for _ in range(NUM_CLASSES)]
        self._densities = self._curve.densities()
        self._rank()

    def add(self, blocks: Sequence[int]) -> None:
        """Append each block to its class's queue for the current epoch."""
        following, previous, num_uses = self._following, self._previous, self._num_uses
        current = self._current
        for block in blocks:
            queue = current[num_uses[block] > 0]
            last = previous[queue]
            following[last] = block
            previous[block] = last
            following[block] = queue
            previous[queue] = block
            if not block % SAMPLE_EVERY:
                self._start_sample(block)

    def revive(self, block: int) -> None:
        """Remove a block that is used again; if the block is sampled, the reuse curve learns from
        it."""
        self._queues.unlink(block)
        if not block % SAMPLE_EVERY:
            key = self._content[block]
            assert key is not None
            self._end_sample(key[1])

    def drop(self, block: int) -> None:
        """Remove a block; its sample continues, since the content may be computed again."""
        self._queues.unlink(block)

    def take(self, count: int, evicted: list[ContentKey]) -> list[int]:
        """Take from the queues in the order of their ranking; evictions advance the epoch."""
        following, content = self._following, self._content
        taken: list[int] = []
        queue = self._first_queue()
        block = following[queue]
        for _ in range(count):
            if block == queue:
                following[queue] = self._previous[queue] = queue
                queue = self._first_queue()
                block = following[queue]
            taken.append(block)
            block = following[block]
        following[queue] = block
        self._previous[block] = queue
        keys = [key for block in taken if (key := content[block]) is not None]
        assert len(keys) == count, "a block in the order has no content"
        evicted += keys
        self._young_ghosts.update([digest for _, digest in keys])
        for block in taken:
            content[block] = None
        self._num_left_in_epoch -= count
        if self._num_left_in_epoch <= 0:
            self._move_clock()
        return taken

    def recall(self, digests: Sequence[bytes]) -> list[bool]:
        """Return for each digest whether its content is among those evicted recently.

        Only the first digests can be, since a chain's head is evicted after its tail.
        """
        if not self._samples.keys().isdisjoint(digests):
            for digest in digests:
                self._end_sample(digest)
        young, old = self._young_ghosts, self._old_ghosts
        count = 0
        for digest in digests:
            if digest not in young and digest not in old:
                break
            count += 1
        return [True] * count + [False] * (len(digests) - count)

    def block_ids(self) -> list[int]:
        """All blocks, from the queue with the lowest density to that with the highest."""
        return [block for queue in self._ranking for block in self._queues.block_ids(queue)]

    def _first_queue(self) -> int:
        following = self._following
        for position, queue in self._current_ranks:  # only open queues can have filled again
            if position < self._position and following[queue] != queue:
                return queue
        while True:
            queue = self._ranking[self._position]
            if following[queue] != queue:
                return queue
            self._position += 1

    def _start_sample(self, block: int) -> None:
        key = self._content[block]
        assert key is not None
        if key[1] not in self._samples:  # another group's block may have started it
            reuse_class = int(self._num_uses[block] > 0)
            self._samples[key[1]] = (reuse_class, self._curve.epoch)
            self._curve.start(reuse_class)

    def _end_sample(self, digest: bytes) -> None:
        sample = self._samples.pop(digest, None)
        if sample is not None:
            self._curve.record_reuse(*sample)

    def _move_clock(self) -> None:
        if len(self._young_ghosts) >= self._ghosts_per_generation:
            self._old_ghosts = self._young_ghosts
            self._young_ghosts = set()
        while self._num_left_in_epoch <= 0:
            self._num_left_in_epoch += self._epoch_length
            self._end_epoch()

    def _end_epoch(self) -> None:
        """Close the open queues. O(queues), which is O(log(age of the oldest block))."""
        for reuse_class, spans in enumerate(self._closed):
            spans.append(_AgeSpan(self._current[reuse_class], 1, self._curve.epoch))
            self._current[reuse_class] = self._queues.new()
            self._compact(spans)
        self._curve.next_epoch()
        oldest_epoch = self._curve.epoch - MAX_AGE
        while self._samples and next(iter(self._samples.values()))[1] < oldest_epoch:
            self._samples.popitem(last=False)
        self._rank()

    def _compact(self, spans: list[_AgeSpan]) -> None:
        """Drop empty spans, and join spans so that at most two have the same width; oldest
        first."""
        for span in spans:
            if self._following[span.queue] == span.queue:
                self._queues.discard(span.queue)
        spans[:] = [span for span in spans if self._following[span.queue] != span.queue]
        last = len(spans) - 1
        while last >= 2 and spans[last - 2].num_epochs == spans[last].num_epochs:
            joined, younger = spans[last - 2], spans.pop(last - 1)
            self._queues.move_all(younger.queue, joined.queue)
            self._queues.discard(younger.queue)
            joined.num_epochs *= 2
            joined.newest_epoch = younger.newest_epoch
            last -= 2

    def _rank(self) -> None:
        epoch = self._curve.epoch
        if epoch % EPOCHS_PER_LESSON == 0:
            self._densities = self._curve.densities()
        ranked: list[tuple[float, int, int, int]] = []
        for reuse_class, by_bin in enumerate(self._densities):
            ranked.append((by_bin[0], reuse_class, 0, self._current[reuse_class]))
            for span in self._closed[reuse_class]:
                age = epoch - span.newest_epoch + (span.num_epochs - 1) // 2
                ranked.append((by_bin[bin_of(age)], reuse_class, -age, span.queue))
        self._ranking = [queue for *_, queue in sorted(ranked)]
        self._current_ranks = [(self._ranking.index(queue), queue) for queue in self._current]
        self._current_ranks.sort()
        self._position = 0


# It gets more hits than LRU when memory is short, see docs/memory.md.
DEFAULT_ORDER = "hit_density"

EVICTION_ORDERS: Registry[OrderFactory] = Registry(
    "eviction order", {DEFAULT_ORDER: HitDensityOrder, "lru": LruOrder}
)
