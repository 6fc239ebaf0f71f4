"""Resume points of hybrid models: prefixes from which sessions continue, each evicted as a unit.

To continue from the end of a branch, a sequence needs the blocks that its windows see there, its
states, and the prefix before it. When one of these blocks is evicted, the others are useless. They
are evicted next, from the tail back to the point where another branch starts. So a pool that is too
small for all sessions loses one session completely, not a part of each. `kv_cache_manager` and
`hybrid_demotion` use this module.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from quire.core.memory.block_pool import BlockPool
from quire.core.memory.eviction import ContentKey
from quire.core.memory.growth import Growth
from quire.core.memory.hash_chain import DIGEST_BYTES
from quire.core.memory.prefix_cache import PrefixCache
from quire.core.memory.state_snapshots import StateSnapshots


class _ResumePoint(NamedTuple):
    """The end of a branch, from which sequences can continue."""

    #: Digests of all blocks of the prefix, including a partly filled last one.
    digests: Sequence[bytes]
    #: Index of the first block that a window sees.
    first: int
    #: Number of tokens in the prefix.
    num_tokens: int


class ResumePoints:
    """Finds the resume points that need a given block.

    Invariant: `_named[digest]` lists the keys of all points that need the contents with this
    digest. The key of a point in `_points` is the digest of its last block. No point needs a
    content that was evicted.
    """

    def __init__(
        self, cache: PrefixCache, pool: BlockPool, growth: Growth, snapshots: StateSnapshots
    ) -> None:
        self._cache = cache
        self._pool = pool
        self._growth = growth
        self._snapshots = snapshots
        self._points: dict[bytes, _ResumePoint] = {}
        self._named: dict[bytes, list[bytes]] = {}

    def add(self, digests: Sequence[bytes], num_tokens: int) -> None:
        """Record that sequences can continue after num_tokens tokens, whose blocks have these
        digests.

        Does nothing if a needed block is missing.
        """
        name = digests[-1]
        needed = [rule.first_needed(num_tokens) for rule in self._growth.windows]
        first = min([*needed, len(digests) - 1])
        end = _ResumePoint(digests, first, num_tokens)
        if name in self._points or not self._is_there(end):
            return
        self._points[name] = end
        for digest in digests[first:]:
            self._named.setdefault(digest, []).append(name)

    def on_evicted(self, evicted: Iterable[ContentKey]) -> None:
        """Demote the blocks that were needed only by resume points that lost one of the evicted
        contents."""
        for group, key in evicted:
            digest = key[:DIGEST_BYTES]  # a state's block has the state's digest and an index
            for name in tuple(self._named.get(digest, ())):
                if self._needs(name, group, digest):
                    self._drop(name)

    def clear(self) -> None:
        """Forget all resume points, because all contents are forgotten."""
        self._points.clear()
        self._named.clear()

    def check(self) -> None:
        """Raise AssertionError unless all blocks that the resume points need are cached."""
        listed = {(digest, name) for digest, names in self._named.items() for name in names}
        needed = {
            (digest, name)
            for name, end in self._points.items()
            for digest in end.digests[end.first :]
        }
        assert listed == needed and all(self._named.values())
        for end in self._points.values():
            assert self._is_there(end), "a resume point lacks a block"

    def _is_there(self, end: _ResumePoint) -> bool:
        find, growth = self._cache.find, self._growth
        for rule in growth.growing:
            first = max(end.first, rule.first_needed(end.num_tokens))
            if None in [find(rule.group, digest) for digest in end.digests[first:]]:
                return False
        return not growth.states or self._snapshots.find(end.digests[-1]) is not None

    def _needs(self, name: bytes, group: int, digest: bytes) -> bool:
        end, rule = self._points[name], self._growth.rules[group]
        if not rule.has_slots:
            return name == digest
        index = end.digests.index(digest, end.first)
        return index >= rule.first_needed(end.num_tokens)

    def _drop(self, name: bytes) -> None:
        """Forget a resume point and demote its blocks.

        Costs O(its prefix); each block is demoted once.
        """
        end = self._points.pop(name)
        for digest in end.digests[end.first :]:
            others = self._named[digest]
            others.remove(name)
            if not others:
                del self._named[digest]
        # Demote its states, then the blocks of windows, then the prefix back to the point where
        # another branch starts.
        for pages in self._snapshots.find(name) or ():
            for page in pages:
                if not self._pool.ref_count[page]:
                    self._pool.demote(page)
        for digest in reversed(end.digests[end.first :]):
            for rule in self._growth.windows:
                if not self._is_needed(rule.group, digest):
                    self._demote_unheld(rule.group, digest)
        after = b""
        for digest in reversed(end.digests):
            if digest in self._named or self._cache.has_other_child(digest, after):
                break
            after = digest
            for whole in self._growth.unbounded:
                self._demote_unheld(whole.group, digest)

    def _is_needed(self, group: int, digest: bytes) -> bool:
        return any([self._needs(name, group, digest) for name in self._named.get(digest, ())])

    def _demote_unheld(self, group: int, key: bytes) -> None:
        """Demote a block if it is cached and not held."""
        block = self._cache.find(group, key)
        if block is not None and not self._pool.ref_count[block]:
            self._pool.demote(block)
