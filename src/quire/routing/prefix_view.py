"""Estimates which replicas have cached a prefix, from the requests placed on them.

A prompt counts as cached on its replica until later prompts there have filled the replica's block
pool. As in the real pools, the least recently used prompt is evicted first, from its end. Replicas
report nothing about their caches.

A long prompt has a chain of many digests, one for each block. Only digests at some positions are
kept: the first 2 * PER_OCTAVE, then PER_OCTAVE for each doubling of the length. So a found prefix
is too short by at most 1 / PER_OCTAVE of its length, and the cost of a prompt grows with the
logarithm of its length.

    blocks   1 2 3 ... 16   18 20 ... 32   36 40 ... 64   72 80 ... 128
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from itertools import compress, pairwise

PER_OCTAVE = 8
LEAST_PLACEMENTS = 64
"""A placement records a prompt that was placed on a replica. Stale ones are not removed before the
replica has this many."""


class KeptPositions:
    """The block positions whose digests are kept. They are the same for every chain of digests."""

    def __init__(self) -> None:
        self.ends = list(range(1, 2 * PER_OCTAVE + 1))
        """The number of blocks up to and including each kept position."""

    def of_chain(self, digests: Sequence[bytes]) -> list[bytes]:
        """The digests of the chain at the kept positions."""
        ends = self.ends
        while ends[-1] < len(digests):
            first = ends[-1]
            ends += range(first + first // PER_OCTAVE, 2 * first + 1, first // PER_OCTAVE)
        return [digests[end - 1] for end in ends[: bisect_right(ends, len(digests))]]


class _Held:
    """The blocks that one replica is assumed to hold.

    Invariant: if `last_use` has a digest, it also has the kept digests of all shorter prefixes.
    `num_blocks` is the number of blocks that placements added, minus the evicted blocks.
    """

    def __init__(self, bit: int, capacity: int) -> None:
        #: The mask with the bit of this replica.
        self.bit = bit
        #: Number of blocks in the replica's pool.
        self.capacity = capacity
        self.num_blocks = 0
        #: Maps each digest to the number of the last placement that contained it. Evicted digests
        #: are absent.
        self.last_use: dict[bytes, int] = {}
        self.placements: deque[tuple[int, list[bytes], int]] = deque()
        """(number, kept digests, number of blocks after the last kept digest), oldest first."""
        #: Number of placements at which stale placements are removed.
        self.compact_at = LEAST_PLACEMENTS


class PrefixView:
    """Maps the digest of each prefix to the replicas that are assumed to have the prefix cached.

    Invariant: bit i of `holders[digest]` is set if and only if replica i holds the digest. A digest
    that no replica holds has no entry.
    """

    def __init__(self) -> None:
        self.positions = KeptPositions()
        self.holders: dict[bytes, int] = {}
        self._held: dict[int, _Held] = {}
        self._num_placements = 0

    def add_replica(self, index: int, num_blocks: int) -> None:
        """Add a replica with an empty cache of `num_blocks` blocks."""
        self._held[index] = _Held(1 << index, num_blocks)

    def remove_replica(self, index: int) -> None:
        """Remove a replica and its cache."""
        self.forget(index)
        del self._held[index]

    def forget(self, index: int) -> None:
        """Empty the cache of a replica."""
        held = self._held[index]
        self._drop(held, list(held.last_use))
        self._held[index] = _Held(held.bit, held.capacity)

    def masks(self, kept: Sequence[bytes]) -> list[int]:
        """For each digest in `kept`, the mask of the replicas that hold it; ends before the first
        digest that no replica holds. Each mask is a subset of the previous one."""
        found: list[int] = []
        for mask in map(self.holders.get, kept):
            if mask is None:
                break
            found.append(mask)
        return found

    def place(self, index: int, kept: list[bytes], num_known: int, num_blocks: int) -> None:
        """Record that a prompt goes to a replica. The replica already holds the first `num_known`
        of the prompt's kept digests.

        `num_blocks` is the number of blocks that prompt and output will take there.
        """
        held, holders = self._held[index], self.holders
        self._num_placements += 1
        number, bit, ends = self._num_placements, held.bit, self.positions.ends
        # First, mark the replica as a holder of the digests that are new to it.
        for digest in kept[num_known:]:
            holders[digest] = holders.get(digest, 0) | bit
        held.last_use.update(dict.fromkeys(kept, number))
        # Then count the blocks that the placement adds, and evict those that don't fit.
        num_kept = ends[len(kept) - 1] if kept else 0
        num_beyond = max(0, num_blocks - num_kept)
        held.placements.append((number, kept, num_beyond))
        held.num_blocks += num_beyond + num_kept - (ends[num_known - 1] if num_known else 0)
        if held.num_blocks > held.capacity:
            self._evict(held)
        if len(held.placements) >= held.compact_at:
            self._compact(held)

    def _evict(self, held: _Held) -> None:
        """Evict blocks of the oldest placements, from the end of each, until the other blocks
        fit."""
        ends, last_use = self.positions.ends, held.last_use
        gone: list[bytes] = []
        excess = held.num_blocks - held.capacity
        while excess > 0 and held.placements:
            number, kept, num_beyond = held.placements.popleft()
            excess -= num_beyond
            at = len(kept)
            while at and excess > 0:
                at -= 1
                # A later placement may have used this digest again; then it stays.
                if last_use[kept[at]] == number:
                    excess -= ends[at] - (ends[at - 1] if at else 0)
                    del last_use[kept[at]]
                    gone.append(kept[at])
            if at:
                held.placements.appendleft((number, kept[:at], 0))
        held.num_blocks = held.capacity + excess
        self._unmark(held.bit, gone)

    def _compact(self, held: _Held) -> None:
        """Remove stale placements. A placement is stale, for example after its prompt was repeated,
        if later placements contain all of its digests, and it has no blocks after its last kept
        digest. Each remaining placement has at least one block that no later placement has."""
        held.placements = deque(
            (number, kept, num_beyond)
            for number, kept, num_beyond in held.placements
            if num_beyond or (kept and held.last_use[kept[-1]] == number)
        )
        held.compact_at = max(LEAST_PLACEMENTS, 2 * len(held.placements))

    def _drop(self, held: _Held, digests: list[bytes]) -> None:
        for digest in digests:
            del held.last_use[digest]
        self._unmark(held.bit, digests)

    def _unmark(self, bit: int, digests: list[bytes]) -> None:
        holders = self.holders
        for digest in digests:
            left = holders[digest] & ~bit
            if left:
                holders[digest] = left
            else:
                del holders[digest]

    # ---- checks -----------------------------------------------------------------------------

    def check(self) -> None:
        """Raise AssertionError unless the invariants hold."""
        expected: dict[bytes, int] = {}
        ends = self.positions.ends
        for held in self._held.values():
            num_blocks = 0
            newest: dict[bytes, int] = {}
            for number, kept, num_beyond in held.placements:
                num_blocks += num_beyond
                assert all(digest in held.last_use for digest in kept), "a prefix has a gap"
                newest |= dict.fromkeys(kept, number)
                own = [held.last_use[digest] == number for digest in kept]
                widths = [end - before for before, end in pairwise([0, *ends])]
                num_blocks += sum(compress(widths, own))
            assert newest == held.last_use
            assert num_blocks == held.num_blocks <= held.capacity
            for digest in held.last_use:
                expected[digest] = expected.get(digest, 0) | held.bit
        assert expected == self.holders
