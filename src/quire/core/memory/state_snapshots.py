"""Snapshots of recurrent states after a prefix, found by the prefix's content.

A recurrent state can't be rewound to fewer tokens, so continuing from a prefix needs the state
exactly as it was at the prefix's end. Steps of a sequence therefore end at a few places, where its
state becomes immutable and is published in the prefix cache. The sequence's next step continues in
a copy. The places (cf. Marconi: Pan et al., MLSys 2025, section 4):

    the last full block of the prompt      for a second request with this prompt, or a longer one
    where branches part                    for a prefix whose tokens were found, but no state
    every `interval` tokens                for any other prefix; forgotten first
    the end of a sequence                  for a follow-up, at once

Block i of a group's state is in the cache under the key (group, the prefix's digest followed by the
bytes of i). A state is available only if all of its blocks are cached.
"""

from collections.abc import Iterable

from quire.core.memory.block_pool import BlockPool
from quire.core.memory.eviction import ContentKey
from quire.core.memory.growth import Growth
from quire.core.memory.hash_chain import DIGEST_BYTES
from quire.core.memory.prefix_cache import PrefixCache
from quire.core.sequence import Sequence, Snapshot

_INDEX_BYTES = 2

# Memory of periodic snapshots, relative to that of the tokens between them in other groups.
INTERVAL_SHARE = 0.25
# Minimum number of tokens between two periodic snapshots.
MIN_INTERVAL_TOKENS = 256


def page_name(digest: bytes, index: int) -> bytes:
    """The name of one block of a state in the prefix cache."""
    return digest + index.to_bytes(_INDEX_BYTES, "big")


def forget_unheld(cache: PrefixCache, pool: BlockPool, keys: Iterable[ContentKey]) -> None:
    """Remove the cached blocks of `keys` that no sequence holds and that are not pinned.

    Called before newly computed blocks with the same contents are cached. The contents were in the
    cache, but were computed again, because a request could not continue from their prefix. Removing
    the old copies lets all blocks of the prefix have the same time of last use.
    """
    for key in keys:
        block = cache.find(*key)
        if block is not None and not pool.ref_count[block] and not pool.is_pinned(block):
            cache.remove_run([key])
            pool.forget(block)


class StateSnapshots:
    """Finds, publishes and forgets the states of all state groups together."""

    def __init__(self, cache: PrefixCache, pool: BlockPool, growth: Growth, enabled: bool) -> None:
        #: Whether snapshots are kept.
        self.enabled = enabled and bool(growth.states)
        self._cache = cache
        self._pool = pool
        self._rules = growth.states
        size = growth.block_size
        num_blocks = growth.state_size / (INTERVAL_SHARE * max(1, len(growth.unbounded)))
        interval = max(MIN_INTERVAL_TOKENS, round(num_blocks * size))
        #: Number of tokens between periodic snapshots.
        self.interval = -(-interval // size) * size

    # ---- where sequences stop ---------------------------------------------------------------

    def tokens_to_stop(self, sequence: Sequence, most: int) -> int:
        """Number of tokens, at most `most`, until the sequence has to stop for a snapshot."""
        if not self.enabled or sequence.is_in_one_step:
            return most
        return min(most, self._tokens_from(sequence, sequence.num_computed_tokens))

    def most_drafts(self, sequence: Sequence, most: int) -> int:
        """The most drafts, up to `most`, with which a sequence stops for the same snapshots as
        without drafts, however many of them are accepted.

        Its state is known after all tokens before the drafts, and next after the token that follows
        the accepted drafts. That position must not be beyond a stop, nor beyond the second last
        token, after which the state is published at the sequence's end.
        """
        if not self.enabled:
            return most
        num_tokens = sequence.num_tokens
        num_left = sequence.max_num_tokens - 1 - num_tokens
        return min(most, max(0, min(self._tokens_from(sequence, num_tokens), num_left) - 1))

    def _tokens_from(self, sequence: Sequence, num_tokens: int) -> int:
        """Number of tokens from a position to the sequence's next stop."""
        stop = (num_tokens // self.interval + 1) * self.interval
        stops = [stop, *(anchor for anchor in sequence.anchors if anchor > num_tokens)]
        return min(stops) - num_tokens

    def stops_at(self, sequence: Sequence, num_tokens: int) -> bool:
        """Whether to keep a snapshot of the state after the sequence's first num_tokens tokens."""
        if not self.enabled or not num_tokens or sequence.is_in_one_step:
            return False
        return not num_tokens % self.interval or num_tokens in sequence.anchors

    def awaits(self, sequence: Sequence) -> bool:
        """Whether the sequence must not compute its next token yet, because a step in flight writes
        a state that will be kept as a snapshot."""
        computed = sequence.num_computed_tokens
        return sequence.num_confirmed_tokens < computed and self.stops_at(sequence, computed)

    # ---- contents ---------------------------------------------------------------------------

    def find(self, digest: bytes) -> tuple[tuple[int, ...], ...] | None:
        """The blocks of the state after this prefix, by state group; None if it is not cached."""
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

        From then on, the states must be copied before they are changed. If the cache already has a
        state for this digest that is held or pinned, that state stays, and the sequence's state is
        not cached.
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
            forget_unheld(self._cache, self._pool, [(rule.group, name) for name in names])
            inserted = self._cache.insert_run(rule.group, names, table, names, b"")
            is_reused = sequence.continues_session
            self._pool.set_contents(rule.group, inserted, is_reused)
        sequence.shares_tail = True
        sequence.end_plain()

    def _is_held(self, digest: bytes) -> bool:
        pages = [page for run in self.find(digest) or () for page in run]
        ref_count, is_pinned = self._pool.ref_count, self._pool.is_pinned
        return any([ref_count[page] or is_pinned(page) for page in pages])

    def demote(self, digest: bytes) -> None:
        """Let a state be evicted before others, if it is cached."""
        for pages in self.find(digest) or ():
            for page in pages:
                self._pool.demote(page)

    def digest_of(self, page: int) -> bytes | None:
        """The digest of the snapshot to which this block belongs; None for a block of a sequence's
        own state."""
        content = self._pool.content[page]
        return None if content is None else content[1][:DIGEST_BYTES]

    def forget_rest(self, evicted: Iterable[ContentKey]) -> None:
        """Forget the other blocks of states that lost a block by eviction, since an incomplete
        state is useless."""
        groups = {rule.group for rule in self._rules}
        digests = [name[:DIGEST_BYTES] for group, name in evicted if group in groups]
        # A dict keeps the order of eviction, which a set of bytes does not keep in all processes.
        for digest in dict.fromkeys(digests):
            for rule in self._rules:
                for index in range(rule.num_blocks):
                    name = page_name(digest, index)
                    page = self._cache.find(rule.group, name)
                    if page is not None:
                        self._cache.remove_run([(rule.group, name)])
                        self._pool.forget(page)
