"""Matches sequences with cached blocks, and publishes the blocks that they computed.

Reads and writes the prefix cache for `kv_cache_manager`, which alone takes and releases blocks.

    own chain      root(domain) -> block 0 -> block 1 -> ...      full blocks, by hash
    public chain   root("*")    -> block 0 -> ...                 the same for what all may read
    then           the neighbour in the tree of tokens            part of one more block, copied
"""

from collections.abc import Sequence as Ids
from typing import NamedTuple

from quire.core.memory.block_pool import BlockPool
from quire.core.memory.prefix_cache import PrefixCache, sortable
from quire.core.sequence import MissReason, PrefixMiss, Sequence

# Of a difference, so many tokens are kept before it and after it.
TOKENS_AROUND = 8


class PrefixMatch(NamedTuple):
    """What a waiting sequence could go on from, beyond the blocks that it still holds.

    num_tokens: computed tokens that it would start with, held ones included.
    num_written_tokens: those of them that no step in flight has yet to write, nor a copy to bring.
    blocks: by group, full blocks to share; all of equal length.
    partial: by group, a block whose first tokens are the next ones: to be copied. Empty: none.
    num_revived: how many of all these are free now and would be taken from the free ones.
    leader: the sequence that is computing the next block just now, or None.
    """

    num_tokens: int
    num_written_tokens: int
    blocks: tuple[tuple[int, ...], ...]
    partial: tuple[int, ...] = ()
    num_revived: int = 0
    leader: Sequence | None = None


class PrefixIndex:
    """Sequences' side of the prefix cache.

    Invariant: `_computing` names, for full blocks that a running sequence is about to compute and
    no other was when it was admitted, that sequence.
    """

    def __init__(self, cache: PrefixCache, pool: BlockPool, num_groups: int, enabled: bool) -> None:
        self.cache = cache
        self.enabled = enabled
        self.num_query_tokens = 0
        self.num_hit_tokens = 0
        self.misses: dict[MissReason, int] = dict.fromkeys(MissReason, 0)
        self._pool = pool
        self._no_blocks: tuple[tuple[int, ...], ...] = ((),) * num_groups
        self._computing: dict[bytes, Sequence] = {}

    def start_chain(self, domain: str) -> bytes:
        """The root of a new sequence's hash chain."""
        return self.cache.root(domain)

    def hash_prompt(self, branches: list[Sequence]) -> None:
        """Hash the prompt that new branches have in common, once for all of them."""
        if self.enabled:
            self._extend_chain(branches[0])
            for sequence in branches[1:]:
                sequence.chain = list(branches[0].chain)
                sequence.chain_tokens = list(branches[0].chain_tokens)

    # ---- finding ----------------------------------------------------------------------------

    def match(self, sequence: Sequence) -> PrefixMatch:
        """The longest prefix that is there and leaves at least one token to compute: held blocks,
        then full blocks of the sequence that it forks from, or of the cache, then part of a block.

        Changes nothing but the sequence's chains of hashes.
        """
        best = self._match_parent(sequence)
        if self.enabled and not sequence.needs_whole_prompt:
            found = self._match_cache(sequence)
            if found.num_tokens > best.num_tokens or found.leader is not None:
                return found
        return best

    def _match_parent(self, sequence: Sequence) -> PrefixMatch:
        held, size = sequence.num_computed_tokens, self.cache.block_size
        parent, common = sequence.parent, 0
        # Log-probabilities of the prompt come with its computation, or whole from the parent.
        lacks = (
            sequence.needs_prompt_logprobs and parent is not None and parent.needs_prompt_logprobs
        )
        if parent is not None and held % size == 0 and not lacks:
            most = len(sequence.token_ids) - 1
            common = min(parent.num_computed_tokens, sequence.num_common_tokens, most)
        if parent is None or common <= held:
            return PrefixMatch(held, held, self._no_blocks)
        full = common // size
        blocks = tuple(tuple(table[held // size : full]) for table in parent.block_tables)
        partial = tuple(table[full] for table in parent.block_tables) if common % size else ()
        num_written = min(full * size, parent.num_written_tokens)
        return PrefixMatch(common, num_written, blocks, partial)

    def _match_cache(self, sequence: Sequence) -> PrefixMatch:
        held, size = sequence.num_computed_tokens, self.cache.block_size
        if held % size:
            return PrefixMatch(held, held, self._no_blocks)
        self._extend_chain(sequence)
        chain, longest = sequence.chain, (len(sequence.token_ids) - 1) // size
        blocks: tuple[list[int], ...] = tuple([] for _ in self._no_blocks)
        index = held // size
        chains = [chain]
        if self.cache.has_public:
            chains.append(self._public_chain(sequence, longest))
        num_stops = 0
        while index < longest and num_stops < len(chains):  # each goes on where the other stops
            run = self.cache.find_run(chains[0], index, longest)
            for ids, more in zip(blocks, run, strict=True):
                ids += more
            num_stops = 1 if run[0] else num_stops + 1
            index += len(run[0])
            chains.reverse()
        num_common, partial = self._find_part(sequence, index)
        ref_counts = self._pool.ref_count.__getitem__
        return PrefixMatch(
            index * size + num_common,
            index * size,
            tuple(map(tuple, blocks)),
            partial,
            sum([list(map(ref_counts, ids)).count(0) for ids in (*blocks, partial)]),
            self._computing.get(chain[index]) if index < longest else None,
        )

    def _public_chain(self, sequence: Sequence, num_blocks: int) -> list[bytes]:
        """The hashes of at least its first num_blocks blocks as if published for all."""
        chain = sequence.public_chain
        if len(chain) < num_blocks:
            self.cache.extend_chain(chain, self.cache.public_root, sequence.token_ids)
        return chain

    def _find_part(self, sequence: Sequence, index: int) -> tuple[int, tuple[int, ...]]:
        """How many tokens of block `index` a cached block agrees with, and that block by group."""
        size, token_ids, cache = self.cache.block_size, sequence.token_ids, self.cache
        tail = token_ids[index * size : min((index + 1) * size, len(token_ids) - 1)]
        best: tuple[int, tuple[int, ...]] = (0, ())
        if not tail:
            return best
        parents = [sequence.chain[index - 1] if index else sequence.chain_root]
        if cache.has_public:
            public_chain = self._public_chain(sequence, index)
            parents.append(public_chain[index - 1] if index else cache.public_root)
        for parent in parents:
            near = cache.neighbour(parent, tail)
            if near is not None and near.num_common_tokens > best[0]:
                found = cache.find_all(near.digest)
                if found is not None:
                    best = near.num_common_tokens, found
        return best

    # ---- what is under way ------------------------------------------------------------------

    def start_computing(self, sequence: Sequence, first: int) -> None:
        """Note that a sequence just admitted will compute its full blocks from `first` on."""
        if self.enabled:
            self._extend_chain(sequence)
            for digest in sequence.chain[first:]:
                self._computing.setdefault(digest, sequence)
            sequence.num_registered_blocks = len(sequence.chain)

    def stop_computing(self, sequence: Sequence, first: int, end: int) -> None:
        """The blocks from `first` to `end` are computed, or will not be by this sequence."""
        for digest in sequence.chain[first : min(end, sequence.num_registered_blocks)]:
            if self._computing.get(digest) is sequence:
                del self._computing[digest]

    # ---- making findable --------------------------------------------------------------------

    def publish(self, sequence: Sequence, num_written_tokens: int) -> None:
        """Make the full blocks among the first num_written_tokens findable by their content.

        A content that is known already keeps its older block; this one stays private.
        """
        size = self.cache.block_size
        full = num_written_tokens // size
        first, sequence.num_published_blocks = sequence.num_published_blocks, full
        if not self.enabled:
            return
        self._extend_chain(sequence)
        if first < sequence.num_registered_blocks:
            self.stop_computing(sequence, first, full)
        digests, tokens = sequence.chain[first:full], sequence.chain_tokens[first:full]
        self._insert(sequence, first, digests, tokens)

    def publish_tail(self, sequence: Sequence) -> None:
        """Make the partly filled last block findable too; what is written to it later adds to it.

        For a sequence that is about to give its blocks back.
        """
        size = self.cache.block_size
        num_written = min(sequence.num_written_tokens, len(sequence.token_ids))
        index, offset = divmod(num_written, size)
        if not (self.enabled and offset and sequence.num_published_blocks == index):
            return
        self._extend_chain(sequence)
        parent = sequence.chain[index - 1] if index else sequence.chain_root
        token_ids = sequence.token_ids[index * size : num_written]
        digest = self.cache.hash_tail(parent, token_ids)
        self._insert(sequence, index, [digest], [sortable(token_ids)])

    def _insert(
        self, sequence: Sequence, first: int, digests: list[bytes], tokens: list[bytes]
    ) -> None:
        """Blocks from `first` on, in all groups."""
        parent = sequence.chain[first - 1] if first else sequence.chain_root
        content = self._pool.content
        for group, table in enumerate(sequence.block_tables):
            blocks = table[first : first + len(digests)]
            if any(map(content.__getitem__, blocks)):
                for at in range(len(digests)):
                    self._insert_one(sequence, group, first + at, digests[at], tokens[at])
                continue
            inserted = self.cache.insert_run(group, digests, blocks, tokens, parent, first == 0)
            self._pool.set_contents(group, inserted)

    def _insert_one(
        self, sequence: Sequence, group: int, index: int, digest: bytes, tokens: bytes
    ) -> None:
        """A block that may be known to contain something already."""
        cache, block = self.cache, sequence.block_tables[group][index]
        known = self._pool.content[block]
        if known is not None:
            is_public = known[1] in sequence.public_chain[index : index + 1]
            if is_public or cache.find(group, digest) is not None:
                return  # it was taken from what is published for all, and stays so
            # A partly filled block, which a fork has gone on to fill.
            cache.remove_run([known])
            self._pool.forget(block)
        parent = sequence.chain[index - 1] if index else sequence.chain_root
        inserted = cache.insert_run(group, [digest], [block], [tokens], parent, index == 0)
        self._pool.set_contents(group, inserted)

    def pin(self, token_ids: Ids[int], root: bytes, priority: int, until_s: float | None) -> int:
        """Keep the cached full blocks that token_ids begin with under one chain; see
        `BlockPool.pin`. Returns how many tokens they hold."""
        chain: list[bytes] = []
        self.cache.extend_chain(chain, root, token_ids)
        found = self.cache.find_run(chain, 0, len(chain))
        for blocks in found:
            for block in blocks:
                self._pool.pin(block, priority, until_s)
        return len(found[0]) * self.cache.block_size

    def clear(self) -> None:
        """Forget all cached contents; held blocks stay with their holders, unpublished."""
        for group in range(len(self._no_blocks)):
            for digest, block in self.cache.entries(group).items():
                self.cache.remove_run([(group, digest)])
                self._pool.forget(block)

    # ---- counting ---------------------------------------------------------------------------

    def count(self, sequence: Sequence, match: PrefixMatch) -> None:
        """Keep what a first admission found, and why it found no more."""
        if not self.enabled:
            return
        num_found = min(match.num_tokens, sequence.num_prompt_tokens)
        self.num_query_tokens += sequence.num_prompt_tokens
        self.num_hit_tokens += num_found
        sequence.num_cached_tokens = num_found
        if sequence.needs_whole_prompt:
            sequence.miss = PrefixMiss(MissReason.NOT_ASKED, 0)
        else:
            sequence.miss = explain_miss(
                self.cache,
                sequence.token_ids,
                sequence.chain,
                sequence.chain_root,
                match.num_tokens,
            )
        self.misses[sequence.miss.reason] += 1

    def _extend_chain(self, sequence: Sequence) -> None:
        if len(sequence.chain) < len(sequence.token_ids) // self.cache.block_size:
            sequence.chain_tokens += self.cache.extend_chain(
                sequence.chain, sequence.chain_root, sequence.token_ids
            )


def explain_miss(
    cache: PrefixCache,
    token_ids: Ids[int],
    chain: Ids[bytes],
    root: bytes,
    num_found_tokens: int,
) -> PrefixMiss:
    """Why no more than num_found_tokens of token_ids were found. Changes nothing.

    chain: the hashes of all full blocks of token_ids.
    """
    num_missing = len(token_ids) - 1 - num_found_tokens
    if num_missing <= 0:
        return PrefixMiss(MissReason.NONE, num_found_tokens)
    size = cache.block_size
    index = num_found_tokens // size
    if index < len(chain):
        eviction = cache.eviction_of(chain[index])
        if eviction is not None:
            return PrefixMiss(MissReason.EVICTED, num_found_tokens, eviction=eviction)
    parent = chain[index - 1] if index else root
    tail = token_ids[index * size : (index + 1) * size]
    seen = cache.neighbour(parent, tail)
    if seen is not None and seen.num_common_tokens < min(len(seen.token_ids), len(tail)):
        start = max(0, num_found_tokens - TOKENS_AROUND)
        before = tuple(token_ids[start:num_found_tokens])
        first = num_found_tokens - index * size
        return PrefixMiss(
            MissReason.DIFFERS,
            num_found_tokens,
            tuple(token_ids[start : num_found_tokens + TOKENS_AROUND + 1]),
            before + seen.token_ids[first : first + TOKENS_AROUND + 1],
        )
    if num_missing < size:
        return PrefixMiss(MissReason.BELOW_BLOCK, num_found_tokens)
    if index == 0 and cache.is_first_of_others(tail):
        return PrefixMiss(MissReason.OTHER_DOMAIN, num_found_tokens)
    return PrefixMiss(MissReason.NEVER_SEEN, num_found_tokens)
