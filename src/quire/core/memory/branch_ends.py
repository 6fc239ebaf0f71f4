"""The ends that a hybrid's sessions go on from, each one unit of eviction.

To go on from the end of a branch takes all that its windows see there, its states, and the prefix
before it. When one block of that went, the rest serves nobody: it is taken next, from the tail to
where another branch parts. So a pool too small for all sessions loses one whole, not a part of
each. Used by `kv_cache_manager` and `superseded`.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from quire.core.memory.block_pool import BlockPool
from quire.core.memory.eviction import ContentKey
from quire.core.memory.growth import Growth
from quire.core.memory.hash_chain import DIGEST_BYTES
from quire.core.memory.prefix_cache import PrefixCache
from quire.core.memory.state_snapshots import StateSnapshots


class _End(NamedTuple):
    """digests: of all blocks of the prefix, a partly filled last one included. first: the index of
    the first one that a window sees. num_tokens: of the prefix."""

    digests: Sequence[bytes]
    first: int
    num_tokens: int


class BranchEnds:
    """Knows the living ends by the blocks that they need.

    Invariant: `_named[digest]` lists the ends that need the contents named so, by the name of their
    last block; each is in `_ends`, and none needs a content that was evicted.
    """

    def __init__(
        self, cache: PrefixCache, pool: BlockPool, growth: Growth, snapshots: StateSnapshots
    ) -> None:
        self._cache = cache
        self._pool = pool
        self._growth = growth
        self._snapshots = snapshots
        self._ends: dict[bytes, _End] = {}
        self._named: dict[bytes, list[bytes]] = {}

    def add(self, digests: Sequence[bytes], num_tokens: int) -> None:
        """Sequences can go on after so many tokens, of blocks with these digests, if all that takes
        is there."""
        name = digests[-1]
        needed = [rule.first_needed(num_tokens) for rule in self._growth.windows]
        first = min([*needed, len(digests) - 1])
        end = _End(digests, first, num_tokens)
        if name in self._ends or not self._is_there(end):
            return
        self._ends[name] = end
        for digest in digests[first:]:
            self._named.setdefault(digest, []).append(name)

    def lose(self, evicted: Iterable[ContentKey]) -> None:
        """Contents are forgotten: what only their ends needed is taken next."""
        for group, key in evicted:
            digest = key[:DIGEST_BYTES]  # of a state's page, what the state is named by
            for name in tuple(self._named.get(digest, ())):
                if self._needs(name, group, digest):
                    self._end(name)

    def clear(self) -> None:
        """All contents are forgotten."""
        self._ends.clear()
        self._named.clear()

    def check(self) -> None:
        """Raise AssertionError unless all that the ends need is there."""
        listed = {(digest, name) for digest, names in self._named.items() for name in names}
        needed = {
            (digest, name)
            for name, end in self._ends.items()
            for digest in end.digests[end.first :]
        }
        assert listed == needed and all(self._named.values())
        for end in self._ends.values():
            assert self._is_there(end), "an end lacks what it needs"

    def _is_there(self, end: _End) -> bool:
        find, growth = self._cache.find, self._growth
        for rule in growth.growing:
            first = max(end.first, rule.first_needed(end.num_tokens))
            if None in [find(rule.group, digest) for digest in end.digests[first:]]:
                return False
        return not growth.states or self._snapshots.find(end.digests[-1]) is not None

    def _needs(self, name: bytes, group: int, digest: bytes) -> bool:
        end, rule = self._ends[name], self._growth.rules[group]
        if not rule.has_slots:
            return name == digest
        index = end.digests.index(digest, end.first)
        return index >= rule.first_needed(end.num_tokens)

    def _end(self, name: bytes) -> None:
        """O(its prefix), each block of which is let go once."""
        end = self._ends.pop(name)
        for digest in end.digests[end.first :]:
            others = self._named[digest]
            others.remove(name)
            if not others:
                del self._named[digest]
        for pages in self._snapshots.find(name) or ():
            for page in pages:
                if not self._pool.ref_count[page]:
                    self._pool.demote(page)
        for digest in reversed(end.digests[end.first :]):
            for rule in self._growth.windows:
                if not self._is_needed(rule.group, digest):
                    self._let_go(rule.group, digest)
        after = b""
        for digest in reversed(end.digests):
            if digest in self._named or self._cache.has_other_child(digest, after):
                break
            after = digest
            for whole in self._growth.unbounded:
                self._let_go(whole.group, digest)

    def _is_needed(self, group: int, digest: bytes) -> bool:
        return any([self._needs(name, group, digest) for name in self._named.get(digest, ())])

    def _let_go(self, group: int, key: bytes) -> None:
        """If it is there, and nobody holds it."""
        block = self._cache.find(group, key)
        if block is not None and not self._pool.ref_count[block]:
            self._pool.demote(block)
