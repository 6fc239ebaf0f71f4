"""Matches sequences with cached blocks, and publishes the blocks that they computed.

Reads and writes the prefix cache for `kv_cache_manager`, which alone takes and releases blocks.

    own chain      root(domain, adapter) -> block 0 -> ...        full blocks, by hash
    public chain   root("*", adapter)    -> block 0 -> ...        the same for public contents
    then           the neighbour in the tree of tokens            part of one more block, copied

In a hybrid, groups that keep all tokens are searched first; `group_match` then finds how much of
that prefix the other groups can serve.
"""

from typing import NamedTuple

from quire.core.adapters import BASE_MODEL
from quire.core.content_spans import last_cut
from quire.core.memory.block_pool import BlockPool
from quire.core.memory.group_match import GroupMatch, GroupPart, StatePages
from quire.core.memory.growth import Growth
from quire.core.memory.hash_chain import hash_block
from quire.core.memory.packed_tokens import NOT_A_TOKEN, num_packed, pack, unpack
from quire.core.memory.prefix_cache import PUBLIC_DOMAIN, PrefixCache
from quire.core.memory.resume_points import ResumePoints
from quire.core.memory.state_snapshots import StateSnapshots, forget_unheld
from quire.core.sequence import MissReason, PrefixMiss, Sequence
from quire.core.step import HOLE_BLOCK

# Number of tokens that are reported on each side of the first difference.
TOKENS_AROUND = 8


class PrefixMatch(NamedTuple):
    """The cached prefix that a waiting sequence could start from, beyond the blocks that it
    holds."""

    #: Number of computed tokens that the sequence would start with, including those of blocks that
    #: it holds.
    num_tokens: int
    #: Number of leading tokens of the prefix whose K and V are already written; a step in flight or
    #: a copy writes the others.
    num_confirmed_tokens: int
    #: Full blocks to share, by group, with holes for blocks that are not read. All groups have the
    #: same number, except groups of states, which have none.
    blocks: tuple[tuple[int, ...], ...]
    #: A cached block that begins with the sequence's next tokens, by group with slots; it will be
    #: copied. Empty if there is none.
    partial: tuple[int, ...] = ()
    #: Number of matched blocks that are free now, so that using them leaves fewer free blocks.
    num_revived: int = 0
    #: The sequence that is computing the next block just now, or None.
    leader: Sequence | None = None
    #: Blocks of a snapshot, by state group, that are to be copied. Empty if there is none.
    states: StatePages = ()
    #: Number of tokens in full blocks that are cached in the groups that keep all tokens.
    num_known_tokens: int = 0
    #: Number of tokens that could be served together with the contents of other tiers.
    num_tier_tokens: int = 0

    @property
    def copied(self) -> tuple[int, ...]:
        """All blocks that are to be copied."""
        return (*self.partial, *[page for pages in self.states for page in pages])


class PrefixIndex:
    """Looks up and publishes sequences' contents in the prefix cache.

    Invariant: `_computing` maps the digest of a full block that is not computed yet to the first
    running sequence that was admitted to compute it.
    """

    def __init__(
        self,
        cache: PrefixCache,
        pool: BlockPool,
        growth: Growth,
        snapshots: StateSnapshots,
        resume_points: ResumePoints,
        enabled: bool,
    ) -> None:
        self.cache = cache
        self.enabled = enabled
        #: Number of prompt tokens of all first admissions.
        self.num_query_tokens = 0
        #: Number of prompt tokens that first admissions found in the cache.
        self.num_hit_tokens = 0
        #: Number of first admissions, by the reason why no more of the prompt was found.
        self.misses: dict[MissReason, int] = dict.fromkeys(MissReason, 0)
        self._pool = pool
        self._growth = growth
        self._snapshots = snapshots
        self._resume_points = resume_points
        self._group_match = GroupMatch(cache, growth, snapshots)
        self._is_hybrid = bool(growth.bounded)
        self._growing = [rule.group for rule in growth.growing]
        self._no_blocks: tuple[tuple[int, ...], ...] = ((),) * len(growth.rules)
        self._computing: dict[bytes, Sequence] = {}

    def start_chain(self, domain: str, adapter: str = BASE_MODEL) -> bytes:
        """The root of a new sequence's hash chain; adapter: the digest of its adapter."""
        return self.cache.root(domain, adapter.encode())

    def hash_prompt(self, branches: list[Sequence]) -> None:
        """Hash the common prompt of new branches, once for all of them."""
        if self.enabled:
            self._extend_chain(branches[0])
            for sequence in branches[1:]:
                sequence.chain = list(branches[0].chain)
                sequence.chain_tokens = list(branches[0].chain_tokens)

    # ---- lookups ----------------------------------------------------------------------------

    def match(self, sequence: Sequence, most: int | None = None) -> PrefixMatch:
        """The longest available prefix of at most `most` tokens that leaves at least one token to
        compute, and splits no content that is computed in one step.

        It consists of blocks that the sequence holds, then of full blocks of the parent or of the
        cache, then of part of one block. Changes only the sequence's hash chains.
        """
        most = min(len(sequence.token_ids) - 1, sequence.num_tokens if most is None else most)
        leader: Sequence | None = None
        while True:
            found = self._match_parent(sequence, most)
            if self.enabled and not sequence.needs_whole_prompt:
                cached = self._match_cache(sequence, most)
                more = cached.num_tokens, cached.num_known_tokens
                is_longer = more > (found.num_tokens, found.num_known_tokens)
                if is_longer or cached.leader is not None:
                    found = cached
            # The sequence that computes the block after a longer prefix is worth waiting for.
            leader = leader or found.leader
            most = last_cut(sequence.content_spans, found.num_tokens)
            if most == found.num_tokens:
                return found if found.leader is leader else found._replace(leader=leader)
            assert most >= sequence.num_computed_tokens, f"{sequence} splits a content"

    def _match_parent(self, sequence: Sequence, most: int) -> PrefixMatch:
        held, size = sequence.num_computed_tokens, self.cache.block_size
        parent, common = sequence.parent, 0
        # Prompt log-probabilities require computing the prompt, unless the parent has all of them.
        lacks = (
            sequence.needs_prompt_logprobs and parent is not None and parent.needs_prompt_logprobs
        )
        if parent is not None and held % size == 0 and not lacks:
            common = min(parent.num_computed_tokens, sequence.num_common_tokens, most)
        if parent is None or common <= held:
            return PrefixMatch(held, held, self._no_blocks)
        tables, growth = parent.block_tables, self._growth
        if growth.bounded and (
            held > 0 or not growth.can_keep(tables, common, parent.num_computed_tokens)
        ):
            return PrefixMatch(held, held, self._no_blocks)
        full = common // size
        blocks = tuple(
            tuple(tables[rule.group][held // size : full]) if rule.has_slots else ()
            for rule in growth.rules
        )
        partial: tuple[int, ...] = ()
        if common % size:
            partial = tuple(tables[group][full] for group in self._growing)
        num_confirmed = min(full * size, parent.num_confirmed_tokens)
        states = tuple(tuple(tables[rule.group]) for rule in growth.states)
        return PrefixMatch(common, num_confirmed, blocks, partial, states=states)

    def _match_cache(self, sequence: Sequence, most: int) -> PrefixMatch:
        held, size = sequence.num_computed_tokens, self.cache.block_size
        bounded = self._growth.bounded
        # A preempted hybrid that still holds blocks can continue from them, and needs no match.
        if held % size or (held and bounded):
            return PrefixMatch(held, held, self._no_blocks)
        self._extend_chain(sequence)
        chain, longest = sequence.chain, most // size
        chains = [chain]
        if _reads_public(self.cache, sequence):
            chains.append(self._public_chain(sequence, longest))
        if bounded:
            return self._match_hybrid(sequence, chains, most)
        index = held // size
        blocks, index = self._group_match.full_runs(chains, index, longest)
        num_common, _, partial = self._find_part(sequence, index, most)
        ref_counts = self._pool.ref_count.__getitem__
        return PrefixMatch(
            index * size + num_common,
            index * size,
            tuple(map(tuple, blocks)),
            partial,
            sum([list(map(ref_counts, ids)).count(0) for ids in (*blocks, partial)]),
            self._computing.get(chain[index]) if index < longest else None,
        )

    def _match_hybrid(
        self, sequence: Sequence, chains: list[list[bytes]], most: int
    ) -> PrefixMatch:
        """The longest prefix of at most `most` tokens that all groups can serve, for a sequence
        without blocks."""
        size, match = self.cache.block_size, self._group_match
        longest = most // size
        runs, known = match.full_runs(chains, 0, longest)
        full = match.longest(chains, known)
        best = GroupPart(full * size, (), match.states(chains, full) or ())
        for index in dict.fromkeys((known, full)):
            part = match.part(chains, index, *self._find_part(sequence, index, most))
            if part.num_tokens > best.num_tokens:
                full, best = index, part
        blocks = match.blocks(chains, runs, full, best.num_tokens)
        found = PrefixMatch(
            best.num_tokens,
            full * size,
            blocks,
            best.partial,
            states=best.states,
            num_known_tokens=known * size,
            leader=self._hybrid_leader(sequence, known, longest),
        )
        named = [block for ids in (*blocks, found.copied) for block in ids if block != HOLE_BLOCK]
        ref_count = self._pool.ref_count
        return found._replace(num_revived=sum(not ref_count[block] for block in named))

    def _hybrid_leader(self, sequence: Sequence, known: int, longest: int) -> Sequence | None:
        """The sequence that computes the next block, if it will leave a state to start from."""
        if known >= longest:
            return None
        leader = self._computing.get(sequence.chain[known])
        if leader is None or not self._growth.states:
            return leader
        is_whole = self._computing.get(sequence.chain[longest - 1]) is leader
        end = longest * self.cache.block_size
        return leader if is_whole and self._snapshots.stops_at(leader, end) else None

    def _public_chain(self, sequence: Sequence, num_blocks: int) -> list[bytes]:
        """The public chain's hashes of at least the sequence's first num_blocks blocks."""
        chain = sequence.public_chain
        if len(chain) < num_blocks:
            root = public_root(self.cache, sequence)
            self.cache.extend_chain(chain, root, sequence.token_ids, sequence.content_spans)
        return chain

    def _find_part(
        self, sequence: Sequence, index: int, most: int
    ) -> tuple[int, bytes, tuple[int, ...]]:
        """Find the cached block whose content agrees longest with the sequence's tokens in block
        `index`, as far as they are among its first `most` tokens.

        Returns the number of common tokens, the content's digest, and its block by group with
        slots. In models with states, all tokens of the content must agree, because no state after a
        part of it exists.
        """
        size, token_ids, cache = self.cache.block_size, sequence.token_ids, self.cache
        end = min((index + 1) * size, most)
        best: tuple[int, bytes, tuple[int, ...]] = (0, b"", ())
        if end <= index * size:
            return best
        tail = pack(token_ids, index * size, end, sequence.content_spans)
        parents = [sequence.chain[index - 1] if index else sequence.chain_root]
        if _reads_public(self.cache, sequence):
            public_chain = self._public_chain(sequence, index)
            parents.append(public_chain[index - 1] if index else public_root(cache, sequence))
        for parent in parents:
            near = cache.closest_block(parent, tail, is_whole=bool(self._growth.states))
            if near is not None and near.num_common_tokens > best[0]:
                found = cache.find_all(near.digest, self._growing)
                if found is not None:
                    best = near.num_common_tokens, near.digest, found
        return best

    # ---- blocks being computed --------------------------------------------------------------

    def start_computing(self, sequence: Sequence, first: int) -> None:
        """Note that a sequence just admitted will compute its full blocks from `first` on."""
        if self.enabled:
            self._extend_chain(sequence)
            for digest in sequence.chain[first:]:
                self._computing.setdefault(digest, sequence)
            sequence.num_registered_blocks = len(sequence.chain)

    def stop_computing(self, sequence: Sequence, first: int, end: int) -> None:
        """Note that the blocks from `first` to `end` are computed, or that this sequence won't
        compute them."""
        for digest in sequence.chain[first : min(end, sequence.num_registered_blocks)]:
            if self._computing.get(digest) is sequence:
                del self._computing[digest]

    # ---- publishing -------------------------------------------------------------------------

    def publish(self, sequence: Sequence, num_confirmed_tokens: int) -> None:
        """Make the full blocks among the first num_confirmed_tokens findable by their content.

        A content that is cached already keeps its older block; the new block is not published.
        """
        size = self.cache.block_size
        full = num_confirmed_tokens // size
        first, sequence.num_published_blocks = sequence.num_published_blocks, full
        if not self.enabled:
            return
        self._extend_chain(sequence)
        if first < sequence.num_registered_blocks:
            self.stop_computing(sequence, first, full)
        digests, tokens = sequence.chain[first:full], sequence.chain_tokens[first:full]
        self._insert(sequence, first, digests, tokens)
        snapshots = self._snapshots
        if snapshots.enabled:
            is_settled = num_confirmed_tokens == sequence.num_computed_tokens
            if is_settled and snapshots.stops_at(sequence, num_confirmed_tokens):
                snapshots.publish(sequence, sequence.chain[full - 1])

    def publish_tail(self, sequence: Sequence) -> None:
        """Make the partly filled last block findable too, and the states after it.

        Called for a sequence that is about to free its blocks. Tokens that are written to the block
        later do not change its content.
        """
        size = self.cache.block_size
        num_confirmed = min(sequence.num_confirmed_tokens, len(sequence.token_ids))
        index, offset = divmod(num_confirmed, size)
        keeps = self.enabled and sequence.num_published_blocks == index
        if not keeps or not num_confirmed or not (offset or self._snapshots.enabled):
            return
        self._extend_chain(sequence)
        parent = digest = sequence.chain[index - 1] if index else sequence.chain_root
        if offset:
            tokens = pack(sequence.token_ids, index * size, num_confirmed, sequence.content_spans)
            digest = hash_block(parent, tokens)
            self._insert(sequence, index, [digest], [tokens])
        if self._snapshots.enabled and num_confirmed == sequence.num_computed_tokens:
            self._snapshots.publish(sequence, digest)

    def _insert(
        self, sequence: Sequence, first: int, digests: list[bytes], tokens: list[bytes]
    ) -> None:
        """Publish blocks from `first` on, in all groups with slots."""
        parent = sequence.chain[first - 1] if first else sequence.chain_root
        content = self._pool.content
        # A hybrid's session is reused as a whole or not at all, so if its prefix was reused, its
        # new blocks count as reused, too.
        is_reused = self._is_hybrid and sequence.continues_session
        for group in self._growing:
            blocks = sequence.block_tables[group][first : first + len(digests)]
            if any(map(content.__getitem__, blocks)):
                for at in range(len(digests)):
                    self._insert_one(sequence, group, first + at, digests[at], tokens[at])
                continue
            if self._is_hybrid:
                forget_unheld(self.cache, self._pool, [(group, digest) for digest in digests])
            inserted = self.cache.insert_run(group, digests, blocks, tokens, parent, first == 0)
            self._pool.set_contents(group, inserted, is_reused)

    def _insert_one(
        self, sequence: Sequence, group: int, index: int, digest: bytes, tokens: bytes
    ) -> None:
        """Publish a block that may have a content already."""
        cache, block = self.cache, sequence.block_tables[group][index]
        known = self._pool.content[block]
        if known is not None:
            is_public = known[1] in sequence.public_chain[index : index + 1]
            if is_public or cache.find(group, digest) is not None:
                return  # it keeps its public content, or the digest has another block
            # A partly filled block that a fork has filled since.
            cache.remove_run([known])
            self._pool.forget(block)
            self._resume_points.on_evicted([known])
        parent = sequence.chain[index - 1] if index else sequence.chain_root
        inserted = cache.insert_run(group, [digest], [block], [tokens], parent, index == 0)
        self._pool.set_contents(group, inserted)

    def pin(self, token_ids: list[int], root: bytes, priority: int, until_s: float | None) -> int:
        """Pin the cached full blocks at the beginning of token_ids, in the chain from `root`.

        See `BlockPool.pin`. Returns the number of tokens in the pinned blocks.
        """
        chain: list[bytes] = []
        self.cache.extend_chain(chain, root, token_ids)
        match = self._group_match
        runs, known = match.full_runs([chain], 0, len(chain))
        num_blocks = match.longest([chain], known)
        num_tokens = num_blocks * self.cache.block_size
        blocks = match.blocks([chain], runs, num_blocks, num_tokens)
        for run in (*blocks, *(match.states([chain], num_blocks) or ())):
            for block in run:
                if block != HOLE_BLOCK:
                    self._pool.pin(block, priority, until_s)
        return num_tokens

    def clear(self) -> None:
        """Forget all cached contents; held blocks stay with their holders, unpublished."""
        self._resume_points.clear()
        for group in range(len(self._no_blocks)):
            for digest, block in self.cache.entries(group).items():
                self.cache.remove_run([(group, digest)])
                self._pool.forget(block)

    # ---- counting ---------------------------------------------------------------------------

    def count(self, sequence: Sequence, match: PrefixMatch) -> None:
        """Count the tokens that a first admission found, and why it found no more."""
        if not self.enabled:
            return
        num_found = min(match.num_tokens, sequence.num_prompt_tokens)
        self.num_query_tokens += sequence.num_prompt_tokens
        self.num_hit_tokens += num_found
        sequence.num_cached_tokens = num_found
        if sequence.needs_whole_prompt:
            sequence.miss = PrefixMiss(MissReason.NOT_ASKED, 0)
        elif match.num_known_tokens > match.num_tokens:
            sequence.miss = PrefixMiss(MissReason.PASSED, match.num_tokens)
        elif match.num_tier_tokens > match.num_tokens:
            sequence.miss = PrefixMiss(MissReason.NOT_LOADED, match.num_tokens)
        else:
            sequence.miss = explain_miss(self.cache, sequence, match.num_tokens)
        self.misses[sequence.miss.reason] += 1

    def _extend_chain(self, sequence: Sequence) -> None:
        if len(sequence.chain) < len(sequence.token_ids) // self.cache.block_size:
            sequence.chain_tokens += self.cache.extend_chain(
                sequence.chain, sequence.chain_root, sequence.token_ids, sequence.content_spans
            )


def _reads_public(cache: PrefixCache, sequence: Sequence) -> bool:
    """Whether the cache may have public blocks of the sequence: its first, or later ones that a
    tier loaded."""
    return cache.has_public(public_root(cache, sequence)) or bool(sequence.public_chain)


def public_root(cache: PrefixCache, sequence: Sequence) -> bytes:
    """The root of the public chain, for sequences with the same adapter."""
    adapter = sequence.adapter
    return cache.root(PUBLIC_DOMAIN, adapter.encode()) if adapter else cache.public_root


def explain_miss(cache: PrefixCache, sequence: Sequence, num_found_tokens: int) -> PrefixMiss:
    """Why no more than num_found_tokens of a sequence's tokens were found. Changes nothing.

    The sequence's `chain` has the hashes of all its full blocks.
    """
    # Return the first reason that applies, in the order of MissReason.
    token_ids, spans, chain = sequence.token_ids, sequence.content_spans, sequence.chain
    num_missing = len(token_ids) - 1 - num_found_tokens
    if num_missing <= 0:
        return PrefixMiss(MissReason.NONE, num_found_tokens)
    size = cache.block_size
    index = num_found_tokens // size
    if index < len(chain):
        eviction = cache.eviction_of(chain[index])
        if eviction is not None:
            return PrefixMiss(MissReason.EVICTED, num_found_tokens, eviction=eviction)
    parent = chain[index - 1] if index else sequence.chain_root
    tail = pack(token_ids, index * size, (index + 1) * size, spans)
    seen = cache.closest_block(parent, tail)
    if seen is not None and seen.num_common_tokens < min(num_packed(seen.tokens), num_packed(tail)):
        start, end = max(0, num_found_tokens - TOKENS_AROUND), num_found_tokens + TOKENS_AROUND + 1
        before = unpack(pack(token_ids, start, num_found_tokens, spans))
        first = num_found_tokens - index * size
        cached = before + unpack(seen.tokens)[first : first + TOKENS_AROUND + 1]
        prompt = unpack(pack(token_ids, start, end, spans))
        return PrefixMiss(
            MissReason.DIFFERS,
            num_found_tokens,
            tuple(token_id for token_id in prompt if token_id != NOT_A_TOKEN),
            tuple(token_id for token_id in cached if token_id != NOT_A_TOKEN),
        )
    if num_missing < size:
        return PrefixMiss(MissReason.BELOW_BLOCK, num_found_tokens)
    if index == 0 and cache.is_first_of_others(tail):
        return PrefixMiss(MissReason.OTHER_DOMAIN, num_found_tokens)
    return PrefixMiss(MissReason.NEVER_SEEN, num_found_tokens)
