"""Gives KV blocks to sequences, shares and frees them, and keeps their block tables.

Each group's table grows by the group's own rule (see `growth`). Full and latent groups keep all
blocks, window groups free blocks behind the window, and state groups always have the same few
blocks.

A block that a step in flight may still read, or that the coming step copies, is not freed with its
sequence: the step takes over the reference and drops it when it ends.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain, zip_longest

from quire.core.content_spans import first_cut, last_cut
from quire.core.kv_groups import KVGroup
from quire.core.memory.block_pool import BlockPool, DeferredFrees
from quire.core.memory.copy_on_write import CopyOnWrite
from quire.core.memory.eviction import DEFAULT_ORDER, EVICTION_ORDERS
from quire.core.memory.filled_blocks import FilledBlocks
from quire.core.memory.growth import Growth
from quire.core.memory.hybrid_demotion import HybridDemotion
from quire.core.memory.prefix_cache import PrefixCache
from quire.core.memory.prefix_index import PrefixIndex, PrefixMatch
from quire.core.memory.resume_points import ResumePoints
from quire.core.memory.state_snapshots import StateSnapshots
from quire.core.memory.tiers.block_moves import BlockMoves
from quire.core.memory.tiers.contract import Tiers
from quire.core.sequence import Eviction, Sequence, Snapshot
from quire.core.step import HOLE_BLOCK, BlockCopy, EditKind, TableEdit
from quire.errors import RequestNeverFitsError

# Minimum number of evictions that are remembered, with their times and requests.
MIN_REMEMBERED = 4096


@dataclass(frozen=True, slots=True)
class KVCacheConfig:
    """Size, groups and options of the KV memory."""

    groups: tuple[KVGroup, ...]
    #: Number of blocks in the pool, which all groups share.
    num_blocks: int
    #: Number of tokens that one block holds.
    block_size: int = 16
    enable_prefix_caching: bool = True
    #: Key of the content hashes: 16 random bytes of the installation, or of this process.
    secret: bytes = b""
    #: Name of the eviction order, in `core.memory.eviction`.
    eviction: str = DEFAULT_ORDER
    #: Memory tiers behind the pool, or None.
    tiers: Tiers | None = None


class KVCacheManager:
    """Gives blocks to sequences and takes them back.

    Invariant: a block's reference count is the number of references to it from tables, steps in
    flight and moves; `invariants.check_memory` checks that after any step.

    A subclass may manage the memory in another way, as `bench.baselines` does: the scheduler does
    not depend on the class.
    """

    def __init__(self, config: KVCacheConfig) -> None:
        self.config = config
        self.block_size = config.block_size
        self.num_groups = len(config.groups)
        self.growth = growth = Growth(config.groups, config.block_size)
        self._growing = [rule.group for rule in growth.growing]
        self.pool = BlockPool(config.num_blocks, EVICTION_ORDERS.get(config.eviction))
        self.cache = PrefixCache(
            self.num_groups,
            config.block_size,
            config.secret,
            num_remembered=max(config.num_blocks, MIN_REMEMBERED),
            main=growth.main,
        )
        enabled = config.enable_prefix_caching
        self.snapshots = StateSnapshots(self.cache, self.pool, growth, enabled)
        self.resume_points = ResumePoints(self.cache, self.pool, growth, self.snapshots)
        self.prefixes = PrefixIndex(
            self.cache, self.pool, growth, self.snapshots, self.resume_points, enabled
        )
        self.filled_blocks = FilledBlocks(self.prefixes, self.pool, growth)
        self.deferred = DeferredFrees(self.pool)
        self.demotion = HybridDemotion(
            self.cache, self.pool, growth, self.snapshots, self.resume_points
        )
        self.copy_on_write = CopyOnWrite(growth, self.pool, self.deferred, self._take_blocks)
        self.moves: BlockMoves | None = None
        if config.tiers is not None:
            self.moves = BlockMoves(config.tiers, self.pool, self.cache, growth, self._take_blocks)
        #: Number of blocks that a sequence takes at once when it outgrows its tables; 0 if it never
        #: does.
        self.num_blocks_to_grow = len(growth.growing)
        #: Ended sequences whose states will be published when their last step has ended.
        self.leaving: list[Sequence] = []
        #: Number of blocks set aside for a sequence beyond its tables. The pool counts them as
        #: free, but only this sequence can take them. Empty except in subclasses that need adjacent
        #: blocks.
        self.padding: dict[Sequence, int] = {}
        #: Number of padding blocks of all sequences, including ended ones whose last step is in
        #: flight.
        self.num_padding_blocks = 0
        self.num_evicted_blocks = 0
        #: Engine time of the last `set_time`, for the record of evictions.
        self.now_s = 0.0

    @property
    def num_free_soon(self) -> int:
        """Number of blocks that are free, or may be when the steps and moves in flight have
        ended."""
        num_leaving = sum([self.growth.num_held(ended.block_tables) for ended in self.leaving])
        if self.moves is not None:
            num_leaving += self.moves.num_free_soon
        return self.pool.num_free + self.deferred.num_blocks + num_leaving

    def blocks_for(self, num_tokens: int) -> int:
        """Maximum number of blocks that num_tokens tokens of one sequence occupy, over all
        groups."""
        return self.growth.most_blocks(num_tokens)

    # ---- requests ---------------------------------------------------------------------------

    def share_prompt(self, branches: list[Sequence]) -> None:
        """Let only the first of a prompt's new branches compute the prompt; the others fork from
        it."""
        self.prefixes.hash_prompt(branches)
        for sequence in branches[1:]:
            sequence.fork_from(branches[0])

    def check_fits(self, sequence: Sequence, *, is_fork: bool = False) -> None:
        """Raise RequestNeverFitsError for a sequence that could never finish, even alone.

        For a beam search, the first beam is checked with the blocks of all beams. A subclass may
        raise InvalidRequestError for a sequence that needs an operation which this memory lacks.
        """
        width = max(1, sequence.params.beam_width)
        # The last token is sampled, but its K and V are never written.
        needed = width * self.growth.most_to_hold(
            sequence.max_num_tokens - 1, sequence.num_together
        )
        if needed > self.pool.num_blocks:
            raise RequestNeverFitsError(
                f"request {sequence.request_id!r} may grow to {sequence.max_num_tokens} tokens"
                f"{f' in each of {width} beams' if width > 1 else ''} and so need {needed} KV"
                f" blocks, but the pool has {self.pool.num_blocks}; lower max_tokens, or"
                " give the engine more kv_cache_memory"
            )

    def match(self, sequence: Sequence) -> PrefixMatch:
        """The cached prefix that a waiting sequence could start from; see `PrefixIndex.match`.

        Copying a part of a free block takes one block more than computing that part. If the pool
        lacks this block, the match leaves the part out; otherwise a sequence that just fits would
        never be admitted. For a hybrid model the part can't be left out, so `check_fits` counts the
        block.
        """
        match = self.prefixes.match(sequence)
        if self.growth.bounded:
            return match
        ref_count, num_free = self.pool.ref_count, self.pool.num_free
        while any([not ref_count[block] for block in match.partial]) and (
            self.num_blocks_to_admit(sequence, match) > num_free
        ):
            # The shorter prefix may again end with a part, before a content.
            most = (match.num_tokens - 1) // self.block_size * self.block_size
            match = self.prefixes.match(sequence, most)
        return match

    # ---- getting blocks ---------------------------------------------------------------------

    def num_blocks_to_admit(self, sequence: Sequence, match: PrefixMatch) -> int:
        """Number of free blocks that `admit` takes: new blocks, and matched blocks that no table
        holds."""
        needed = match.num_revived
        lengths = list(map(len, sequence.block_tables)) or [0] * self.num_groups
        num_tokens, end = len(sequence.token_ids), _first_end(sequence, match, self.block_size)
        for rule in self.growth.rules:
            num_there = lengths[rule.group] + len(match.blocks[rule.group])
            needed += max(0, rule.num_reserved(num_tokens, end) - num_there)
        if sequence.shares_tail and self.copy_on_write.is_due(sequence):
            needed += self.copy_on_write.num_copies([sequence])
        return needed

    def admit(self, sequence: Sequence, match: PrefixMatch, step_id: int) -> list[BlockCopy]:
        """Complete a sequence's tables with matched blocks, and with new blocks for all other
        tokens.

        Returns the copies of partly filled blocks and of states, for the plan of step_id; their
        sources are held until that step has ended. The caller has checked num_blocks_to_admit.
        """
        pool, copied = self.pool, match.copied
        # First, hold the matched blocks, so that taking new ones can't evict them.
        if self.growth.bounded:
            self.demotion.count_hit(sequence, match)
        for block in copied:
            pool.share(block)
        if self.growth.bounded:
            self.demotion.demote_copied(match)
        if not sequence.block_tables:
            sequence.block_tables = tuple([] for _ in range(self.num_groups))
        for table, ids in zip(sequence.block_tables, match.blocks, strict=True):
            for block in ids:
                if block != HOLE_BLOCK:
                    pool.share(block)
            table.extend(ids)
        sequence.num_slots = self.growth.num_slots(sequence)
        # Then end its load from the tiers, and count the prefix hit.
        if self.moves is not None:
            num_known = self.moves.loads.num_known_tokens(sequence)
            match = match._replace(num_tier_tokens=num_known)
            self.moves.loads.release(sequence, match.num_tokens)
            self.moves.stores.store_again(chain(copied, *match.blocks))
        if sequence.num_admissions == 0:
            self.prefixes.count(sequence, match)
        sequence.num_admissions += 1
        end = _first_end(sequence, match, self.block_size)
        _start_from(sequence, match, self.block_size)
        if self.snapshots.enabled and match.states:
            digest = self.snapshots.digest_of(match.states[0][0])
            if digest is not None:  # None: the state of the parent that it forks from
                sequence.snapshot = Snapshot(match.num_tokens, digest)
        # Then take new blocks: copies of shared ones, and blocks for the tokens to compute.
        copies: list[BlockCopy] = []
        if self.copy_on_write.is_due(sequence):
            copies += self.copy_on_write.copy(sequence, step_id)[1]
        num_tokens = len(sequence.token_ids)
        for rule in self.growth.rules:
            table = sequence.block_tables[rule.group]
            missing = rule.num_reserved(num_tokens, end) - len(table)
            if missing > 0:
                table.extend(self._take_blocks(missing, sequence))
        sequence.num_slots = self.growth.num_slots(sequence)
        num_full = match.num_tokens // self.block_size
        self.prefixes.start_computing(sequence, num_full)
        # Last, copy the matched block that is partly filled, and the matched states.
        if copied:
            tables = sequence.block_tables
            targets = [
                tables[rule.group][num_full] for rule in self.growth.growing if match.partial
            ]
            if match.states:
                targets += [page for rule in self.growth.states for page in tables[rule.group]]
            loaded = [BlockCopy(*pair) for pair in zip(copied, targets, strict=True)]
            self.deferred.hold_copied(step_id, loaded)
            copies += loaded
        return copies

    def grow(
        self, sequence: Sequence, num_tokens: int, num_extra_blocks: int = 0
    ) -> list[TableEdit] | None:
        """Make room for num_tokens tokens and num_extra_blocks blocks, in all groups or in none.

        Returns the edits of the row's tables (row -1 without a row), or None if the pool has too
        few free blocks; then nothing was changed.
        """
        if num_tokens <= sequence.num_slots:
            return []
        end = -(-num_tokens // self.block_size) + num_extra_blocks
        # First count the missing blocks of all groups: if the pool has too few, no table changes.
        tables, num_missing = sequence.block_tables, 0
        for group in self._growing:
            missing = end - len(tables[group])
            if missing > 0:
                num_missing += missing
        if num_missing > self.pool.num_free:
            return None
        row = -1 if sequence.row is None else sequence.row
        edits: list[TableEdit] = []
        for group in self._growing:
            table = tables[group]
            first = len(table)
            if first < end:
                taken = self._take_blocks(end - first, sequence)
                table.extend(taken)
                edits.append(TableEdit(row, group, EditKind.APPEND, first, tuple(taken)))
        sequence.num_slots = end * self.block_size
        return edits

    def forget_passed(self, sequence: Sequence) -> list[TableEdit]:
        """Free the blocks that windows have passed, counting only steps that have ended; returns
        the holes.

        The blocks stay cached but are evicted first, unless other sequences may start from a prefix
        that ends there.
        """
        num_published = sequence.num_published_blocks * self.block_size
        row = -1 if sequence.row is None else sequence.row
        edits: list[TableEdit] = []
        for rule in self.growth.windows:
            table = sequence.block_tables[rule.group]
            first = end = min(rule.first_needed(num_published), len(table))
            while first and table[first - 1] != HOLE_BLOCK:
                first -= 1
            if first == end:
                continue
            kept = [range(rule.first_needed(at), at // self.block_size) for at in sequence.anchors]
            for index in range(first, end):
                block = table[index]
                if not any([index in run for run in kept]):
                    self.pool.demote(block)
                self.pool.release(block)
            holes = (HOLE_BLOCK,) * (end - first)
            table[first:end] = holes
            edits.append(TableEdit(row, rule.group, EditKind.HOLE, first, holes))
        return edits

    def fork(self, child: Sequence, parent: Sequence) -> None:
        """Give `child` all blocks of `parent` that have computed tokens.

        Blocks of the child beyond the common ones are released.
        """
        num_blocks = -(-parent.num_computed_tokens // self.block_size)
        self.prefixes.stop_computing(child, child.num_published_blocks, child.num_registered_blocks)
        if not child.block_tables:
            child.block_tables = tuple([] for _ in parent.block_tables)
        # First, share the parent's blocks and release the child's, group by group.
        for rule in self.growth.rules:
            table, theirs = child.block_tables[rule.group], parent.block_tables[rule.group]
            end = num_blocks if rule.has_slots else len(theirs)
            same = 0
            if not rule.is_bounded:  # in bounded groups, entries before an equal one may differ
                same = min(len(table), end)
                while same and table[same - 1] != theirs[same - 1]:
                    same -= 1
            for block in theirs[same:end]:
                if block != HOLE_BLOCK:
                    self.pool.share(block, is_use=False)
            for block in reversed(table[same:]):
                if block != HOLE_BLOCK:
                    self.pool.release(block)
            table[same:] = theirs[same:end]
        # Then copy the counts and hashes that belong to these blocks.
        child.num_slots = self.growth.num_slots(child)
        child.num_computed_tokens = parent.num_computed_tokens
        child.num_confirmed_tokens = parent.num_confirmed_tokens
        child.num_published_blocks = parent.num_published_blocks
        child.num_registered_blocks = 0
        child.anchors = parent.anchors
        child.chain[:], child.chain_tokens[:] = parent.chain, parent.chain_tokens
        child.public_chain[:] = parent.public_chain
        is_shared = bool(parent.num_computed_tokens % self.block_size or self.growth.states)
        child.shares_tail = parent.shares_tail = is_shared
        child.end_plain()
        parent.end_plain()

    def _take_blocks(self, count: int, sequence: Sequence) -> list[int]:
        taken, evicted = self.pool.take(count)
        if evicted:
            self.num_evicted_blocks += len(evicted)
            self.cache.remove_run(evicted, Eviction(self.now_s, sequence.request_id))
            if self.growth.states:
                self.snapshots.forget_rest(evicted)
            if self.growth.bounded:
                self.resume_points.on_evicted(evicted)
        return taken

    # ---- giving blocks back -----------------------------------------------------------------

    def num_kept_blocks(self, sequence: Sequence, num_wanted: int) -> int:
        """Number of leading blocks of each group that a sequence keeps if blocks are cut from its
        end until num_wanted have become free.

        Returns 0 if even cutting all would not suffice.
        """
        ref_count, tables = self.pool.ref_count, sequence.block_tables
        growing = [tables[rule.group] for rule in self.growth.growing]
        kept = max(map(len, growing), default=0)
        while kept and num_wanted > 0:
            kept -= 1
            num_wanted -= sum(
                kept < len(table) and table[kept] != HOLE_BLOCK and ref_count[table[kept]] == 1
                for table in growing
            )
        if num_wanted > 0:
            return 0
        computed = sequence.num_computed_tokens
        num_tokens = min(kept * self.block_size, computed)
        return kept if self.growth.can_keep(tables, num_tokens, computed) else 0

    def release_tail(self, sequence: Sequence, num_kept: int, num_wanted: int) -> int:
        """Release a preempted sequence's blocks from index num_kept on, which it does not need.

        If that makes fewer than num_wanted blocks free, further blocks at its end are released.
        Returns the number of freed blocks, as `truncate` does.
        """
        num_freed = self.truncate(sequence, num_kept)
        if num_freed < num_wanted:
            num_kept = self.num_kept_blocks(sequence, num_wanted - num_freed)
            num_freed += self.truncate(sequence, num_kept)
        return num_freed

    def truncate(self, sequence: Sequence, num_kept: int) -> int:
        """Release a sequence's blocks from index num_kept on, in each group.

        Returns the number of blocks that become free, now or when the step in flight that reads
        them has ended. The chain's tail is released first, so that it is evicted before the prefix
        that others share. If windows or states can't continue from num_kept, all blocks are
        released, and the sequence may start from its cached prefix later.
        """
        tables, growth = sequence.block_tables, self.growth
        if not tables:
            return 0
        # First, find how many blocks the sequence can keep.
        growing = [tables[rule.group] for rule in growth.growing]
        longest, computed = max(map(len, growing), default=0), sequence.num_computed_tokens
        num_kept = _last_cut(sequence, num_kept, self.block_size)
        if growth.bounded:
            num_tokens = min(num_kept * self.block_size, computed)
            if not growth.can_keep(tables, num_tokens, computed):
                num_kept = 0
            if not num_kept:
                self.forget_passed(sequence)
        states = [tables[rule.group] for rule in growth.states] if not num_kept else []
        if num_kept >= longest and not any(states):
            return 0
        self.prefixes.stop_computing(
            sequence, sequence.num_published_blocks, sequence.num_registered_blocks
        )
        # Then collect the blocks from the tail on, and cut the tables and the counts.
        cut = [reversed(table[num_kept:]) for table in growing]
        blocks = [page for table in states for page in table]
        blocks += chain.from_iterable(zip_longest(*cut, fillvalue=HOLE_BLOCK))
        if growth.windows:
            blocks = [block for block in blocks if block != HOLE_BLOCK]
        for table in growing:
            del table[num_kept:]
        for table in states:
            table.clear()
        sequence.num_slots = growth.num_slots(sequence) if num_kept else 0
        sequence.end_plain()
        slots = num_kept * self.block_size
        sequence.num_computed_tokens = min(computed, slots)
        sequence.num_confirmed_tokens = min(sequence.num_confirmed_tokens, slots)
        sequence.num_published_blocks = min(sequence.num_published_blocks, num_kept)
        # Last, release the blocks, or let the step that reads them do so.
        ref_count = self.pool.ref_count
        num_freed = list(map(ref_count.__getitem__, blocks)).count(1)
        if self.deferred.is_in_flight(sequence.last_step_id):
            self.deferred.hold(sequence.last_step_id, blocks)
        else:
            self.pool.release_all(blocks)
        return num_freed

    def free(self, sequence: Sequence) -> None:
        """Release all blocks of a sequence, now or when the step that reads them has ended.

        A partly filled last block also stays in the prefix cache, unless a copy into it is still to
        be made, because a failed step would never make it. If all tokens of the sequence are known,
        its states are published when the step in flight that writes them has ended.
        """
        if self.moves is not None:
            self.moves.loads.release(sequence)
        is_last = sequence.num_computed_tokens == len(sequence.token_ids)
        if self.snapshots.enabled and is_last and self.deferred.is_in_flight(sequence.last_step_id):
            self.leaving.append(sequence)
            return
        self._free_ended(sequence, keeps_tail=True)

    def _free_ended(self, sequence: Sequence, *, keeps_tail: bool) -> None:
        index, tables = sequence.num_confirmed_tokens // self.block_size, sequence.block_tables
        growing = [tables[rule.group] for rule in self.growth.growing if tables]
        last = [table[index] for table in growing if index < len(table)]
        last += [page for rule in self.growth.states if tables for page in tables[rule.group]]
        if keeps_tail and not any(map(self.deferred.is_incomplete, last)):
            self.prefixes.publish_tail(sequence)
            if self.growth.bounded and self.config.enable_prefix_caching:
                self.demotion.demote_dead_end(sequence, sequence.num_confirmed_tokens)
        self.truncate(sequence, 0)
        sequence.block_tables = ()

    def publish(self, sequence: Sequence, num_confirmed_tokens: int) -> None:
        """Make the full blocks among the first num_confirmed_tokens findable by their content."""
        self.prefixes.publish(sequence, num_confirmed_tokens)

    def set_time(self, now_s: float) -> None:
        """Set the engine time before a step is planned: evictions are recorded with it, pins end by
        it, and moves advance."""
        self.now_s = self.pool.now_s = now_s
        if self.moves is not None:
            self.moves.advance(now_s)

    def end_step(self, step_id: int, *, has_failed: bool = False) -> None:
        """Release the references of steps up to step_id; steps end in the order of their ids.

        has_failed: the plan of the next step is dropped, too, so its copies are not made.
        """
        ended = [gone for gone in self.leaving if gone.last_step_id <= step_id or has_failed]
        self.deferred.end_step(step_id, has_failed=has_failed)
        for sequence in ended:
            self.leaving.remove(sequence)
            if not has_failed:
                sequence.num_confirmed_tokens = sequence.num_computed_tokens
                self.publish(sequence, sequence.num_confirmed_tokens)
            # After a failed step, the tail and the states have not been written.
            self._free_ended(sequence, keeps_tail=not has_failed)


def _last_cut(sequence: Sequence, num_blocks: int, block_size: int) -> int:
    """Number of leading blocks, at most num_blocks, after which the sequence may continue: their
    end splits no content that is computed in one step."""
    end = num_blocks * block_size
    while end < sequence.num_computed_tokens and last_cut(sequence.content_spans, end) < end:
        end = last_cut(sequence.content_spans, end) // block_size * block_size
    return end // block_size


def _start_from(sequence: Sequence, match: PrefixMatch, block_size: int) -> None:
    """Count matched tokens as computed, and those that are written or published as such, too."""
    held = sequence.num_computed_tokens
    num_confirmed = max(held, match.num_confirmed_tokens)
    if sequence.num_published_blocks == held // block_size:
        sequence.num_published_blocks = num_confirmed // block_size
    if sequence.num_confirmed_tokens == held:
        sequence.num_confirmed_tokens = num_confirmed
    sequence.num_computed_tokens = match.num_tokens


def _first_end(sequence: Sequence, match: PrefixMatch, block_size: int) -> int:
    """Token index at the end of the first block to compute, or of the tokens that one step must
    compute with it."""
    if sequence.is_in_one_step:
        return len(sequence.token_ids)
    end = first_cut(sequence.content_spans, match.num_tokens + 1)
    return max(end, (match.num_tokens // block_size + 1) * block_size)


KVManagerFactory = Callable[[KVCacheConfig, int], KVCacheManager]
"""(config, max_model_len) -> the manager of an engine's memory; see `assembly.build`."""


def paged_manager(config: KVCacheConfig, max_model_len: int) -> KVCacheManager:
    """The factory of memory managers that an engine uses by default."""
    return KVCacheManager(config)
