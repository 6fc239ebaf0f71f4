"""Snapshots of states: what a sequence's states were after a prefix, found by its content.

A state can't be cut: to go on from a prefix, what it was there must have been kept. So sequences
stop at a few places and leave their states there, immutable, as content of the pages that they lie
in; the next step goes on in copies. The places (cf. Marconi: Pan et al., MLSys 2025, section 4):

    the last full block of the prompt      a second request with this prompt, or a longer one
    where branches part                    a prefix whose tokens were found, but no state with them
    every `interval` tokens                whatever else comes; forgotten first
    the end of a sequence                  a follow-up, at once

Page i of a group's state stands in the cache under (group, digest + i); a state is there only if
all of its pages are.
"""

from collections.abc import Iterable

from quire.core.memory.block_pool import BlockPool
from quire.core.memory.eviction import ContentKey
from quire.core.memory.growth import Growth
from quire.core.memory.hash_chain import DIGEST_BYTES
from quire.core.memory.prefix_cache import PrefixCache
from quire.core.sequence import Sequence, Snapshot

_INDEX_BYTES = 2

# Snapshots between may take so much of what the tokens between them take in other groups.
INTERVAL_SHARE = 0.25
# At least so many tokens lie between two of them.
MIN_INTERVAL_TOKENS = 256


def page_name(digest: bytes, index: int) -> bytes:
    """The name of one page of a state in the prefix cache."""
    return digest + index.to_bytes(_INDEX_BYTES, "big")


def give_way(cache: PrefixCache, pool: BlockPool, keys: Iterable[ContentKey]) -> None:
    """Contents were computed again, since their prefix could not be gone on from: forget those that
    nobody holds, so that the new ones, and with them the whole prefix, are as old as its last use.

    Not those that are pinned.
    """
    for key in keys:
        block = cache.find(*key)
        if block is not None and not pool.ref_count[block] and not pool.is_pinned(block):
            cache.remove_run([key])
            pool.forget(block)


class StateSnapshots:
    """Finds, publishes and forgets the states of all state groups together.

    interval: tokens between snapshots that nothing else asks for. enabled: whether any are kept.
    """

    def __init__(self, cache: PrefixCache, pool: BlockPool, growth: Growth, enabled: bool) -> None:
        self.enabled = enabled and bool(growth.states)
        self._cache = cache
        self._pool = pool
        self._rules = growth.states
        size = growth.block_size
        num_blocks = growth.state_size / (INTERVAL_SHARE * max(1, len(growth.unbounded)))
        interval = max(MIN_INTERVAL_TOKENS, round(num_blocks * size))
        self.interval = -(-interval // size) * size

    # ---- where sequences stop ---------------------------------------------------------------

    def tokens_to_stop(self, sequence: Sequence, most: int) -> int:
        """Of `most` tokens that it could compute next, those up to where it has to stop."""
        if not self.enabled or sequence.is_in_one_step:
            return most
        computed = sequence.num_computed_tokens
        stop = (computed // self.interval + 1) * self.interval
        stops = [stop, *(anchor for anchor in sequence.anchors if anchor > computed)]
        return min(most, min(stops) - computed)

    def stops_at(self, sequence: Sequence, num_tokens: int) -> bool:
        """Whether its state after so many tokens is to be kept."""
        if not self.enabled or not num_tokens or sequence.is_in_one_step:
            return False
        return not num_tokens % self.interval or num_tokens in sequence.anchors

    def awaits(self, sequence: Sequence) -> bool:
        """Whether its next token has to wait for a step in flight: its state is to be kept as that
        leaves it."""
        computed = sequence.num_computed_tokens
        return sequence.num_written_tokens < computed and self.stops_at(sequence, computed)

    # ---- contents ---------------------------------------------------------------------------

    def find(self, digest: bytes) -> tuple[tuple[int, ...], ...] | None:
        """By state group, the pages of the state after this prefix; None where it is not there."""
        found: list[tuple[int, ...]] = []
        for rule in self._rules:
            pages: list[int] = []
            for index in range(rule.num_blocks):
                page = self._cache.find(rule.group, page_name(digest, index))
                if page is None:
                    return None
                pages.append(page)
            found.append(tuple(pages))
        return tuple(found)

    def publish(self, sequence: Sequence, digest: bytes) -> None:
        """Make a sequence's states findable, under the digest of all its computed tokens.

        They must be copied before they are changed. A state that is known already, and held or
        pinned, stays where it is, and this one stays private.
        """
        before, num_tokens = sequence.snapshot, sequence.num_computed_tokens
        sequence.snapshot = Snapshot(num_tokens, digest)
        if before.num_tokens < num_tokens and before.num_tokens not in sequence.anchors:
            self.demote(before.digest)
        if self._is_held(digest):
            return
        for rule in self._rules:
            table = sequence.block_tables[rule.group]
            names = [page_name(digest, index) for index in range(rule.num_blocks)]
            give_way(self._cache, self._pool, [(rule.group, name) for name in names])
            inserted = self._cache.insert_run(rule.group, names, table, names, b"")
            is_reused = sequence.continues_session
            self._pool.set_contents(rule.group, inserted, is_reused)
        sequence.shares_tail = True

    def _is_held(self, digest: bytes) -> bool:
        pages = [page for run in self.find(digest) or () for page in run]
        ref_count, is_pinned = self._pool.ref_count, self._pool.is_pinned
        return any([ref_count[page] or is_pinned(page) for page in pages])

    def demote(self, digest: bytes) -> None:
        """Let a state be forgotten before others, if it is there."""
        for pages in self.find(digest) or ():
            for page in pages:
                self._pool.demote(page)

    def digest_of(self, page: int) -> bytes | None:
        """What the snapshot is found by that has this page; None: it is a sequence's own state."""
        content = self._pool.content[page]
        return None if content is None else content[1][:DIGEST_BYTES]

    def forget_rest(self, evicted: Iterable[ContentKey]) -> None:
        """Pages of states were evicted: what is left of these states is of no use."""
        groups = {rule.group for rule in self._rules}
        for digest in {name[:DIGEST_BYTES] for group, name in evicted if group in groups}:
            for rule in self._rules:
                for index in range(rule.num_blocks):
                    name = page_name(digest, index)
                    page = self._cache.find(rule.group, name)
                    if page is not None:
                        self._cache.remove_run([(rule.group, name)])
                        self._pool.forget(page)
