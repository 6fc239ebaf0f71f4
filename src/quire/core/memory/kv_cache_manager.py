"""The block tables of all sequences, by KV group.

Each group's table grows by the group's own rule (see `growth`): some keep a block for every block
of tokens, a window's blocks are freed as it passes them, states take the same few blocks always.
Blocks that a step in flight may still read are not freed with their sequence: their reference
passes to that step and ends with it. So does that of a block from which the coming step copies.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain, zip_longest

from quire.core.kv_groups import KVGroup
from quire.core.memory.block_pool import BlockPool, DeferredFrees
from quire.core.memory.branch_ends import BranchEnds
from quire.core.memory.copy_on_write import CopyOnWrite
from quire.core.memory.eviction import DEFAULT_ORDER, find_order
from quire.core.memory.growth import Growth
from quire.core.memory.prefix_cache import PrefixCache
from quire.core.memory.prefix_index import PrefixIndex, PrefixMatch
from quire.core.memory.state_snapshots import StateSnapshots
from quire.core.memory.superseded import Superseded
from quire.core.memory.tiers.block_moves import BlockMoves
from quire.core.memory.tiers.contract import Tiers
from quire.core.sequence import Eviction, Sequence, Snapshot
from quire.core.step import HOLE_BLOCK, BlockCopy, EditKind, TableEdit
from quire.errors import RequestNeverFitsError

# At least so many evictions are remembered: when, and for which request.
MIN_REMEMBERED = 4096


@dataclass(frozen=True, slots=True)
class KVCacheConfig:
    """What the memory is made of.

    num_blocks: pages in the pool, shared by all groups. block_size: tokens in a block of one group.
    secret: keys the content hashes (16 random bytes of the installation, or of this process).
    eviction: which cached contents are forgotten first; a name in `core.memory.eviction`.
    tiers: what lies behind the pool, if anything does.
    """

    groups: tuple[KVGroup, ...]
    num_blocks: int
    block_size: int = 16
    enable_prefix_caching: bool = True
    secret: bytes = b""
    eviction: str = DEFAULT_ORDER
    tiers: Tiers | None = None


class KVCacheManager:
    """Gives blocks to sequences and takes them back.

    Invariant: a block's reference count is the number of table entries that name it plus the number
    of entries in `holds`; `invariants.check_memory` says so after any step.

    num_blocks_to_grow: blocks that a sequence takes at once when it outgrows its tables; 0 if it
        never does.
    leaving: sequences that have ended, and whose states are kept when their last step has.
    padding: sequence -> blocks set aside for it beyond its tables, which the pool has as free but
        no other sequence can take; none, where blocks lie anywhere. num_padding_blocks: of all,
        and of sequences that have ended but not their last step.

    A subclass may manage the memory in another way, as `bench.baselines` does: the scheduler does
    not depend on the class.
    """

    def __init__(self, config: KVCacheConfig) -> None:
        self.config = config
        self.block_size = config.block_size
        self.num_groups = len(config.groups)
        self.growth = growth = Growth(config.groups, config.block_size)
        self._growing = [rule.group for rule in growth.growing]
        self.pool = BlockPool(config.num_blocks, find_order(config.eviction))
        self.cache = PrefixCache(
            self.num_groups,
            config.block_size,
            config.secret,
            num_remembered=max(config.num_blocks, MIN_REMEMBERED),
            main=growth.main,
        )
        enabled = config.enable_prefix_caching
        self.snapshots = StateSnapshots(self.cache, self.pool, growth, enabled)
        self.ends = BranchEnds(self.cache, self.pool, growth, self.snapshots)
        self.prefixes = PrefixIndex(
            self.cache, self.pool, growth, self.snapshots, self.ends, enabled
        )
        self.deferred = DeferredFrees(self.pool)
        self.superseded = Superseded(self.cache, self.pool, growth, self.snapshots, self.ends)
        self.copy_on_write = CopyOnWrite(growth, self.pool, self.deferred, self._take)
        self.moves: BlockMoves | None = None
        if config.tiers is not None:
            self.moves = BlockMoves(config.tiers, self.pool, self.cache, growth, self._take)
        self.num_blocks_to_grow = len(growth.growing)
        self.leaving: list[Sequence] = []
        self.padding: dict[Sequence, int] = {}
        self.num_padding_blocks = 0
        self.num_evicted_blocks = 0
        self.now_s = 0.0  # for what is remembered of evictions

    @property
    def num_free_soon(self) -> int:
        """Blocks that are free, or may be when the steps in flight have ended."""
        num_leaving = sum([self.growth.num_held(ended.block_tables) for ended in self.leaving])
        if self.moves is not None:
            num_leaving += self.moves.num_free_soon
        return self.pool.num_free + self.deferred.num_blocks + num_leaving

    def blocks_for(self, num_tokens: int) -> int:
        """Pages that num_tokens tokens of one sequence occupy at most, over all groups."""
        return self.growth.most_blocks(num_tokens)

    # ---- requests ---------------------------------------------------------------------------

    def share_prompt(self, branches: list[Sequence]) -> None:
        """Let the new branches of one prompt compute it once: the others fork from the first."""
        self.prefixes.hash_prompt(branches)
        for sequence in branches[1:]:
            sequence.fork_from(branches[0])

    def check_fits(self, sequence: Sequence, *, is_fork: bool = False) -> None:
        """Raise RequestNeverFitsError for a sequence, or a beam search that it leads, that could
        never end, even alone; InvalidRequestError for one that needs what this memory can't do."""
        width = max(1, sequence.params.beam_width)
        # The last token is sampled, but its K and V are never written.
        needed = width * self.growth.most_to_hold(
            sequence.max_num_tokens - 1, in_one_step=sequence.is_in_one_step
        )
        if needed > self.pool.num_blocks:
            raise RequestNeverFitsError(
                f"request {sequence.request_id!r} may grow to {sequence.max_num_tokens} tokens"
                f"{f' in each of {width} beams' if width > 1 else ''} and so need {needed} KV"
                f" blocks, but the pool has {self.pool.num_blocks}; lower max_tokens, or"
                " give the engine more kv_cache_memory"
            )

    def match(self, sequence: Sequence) -> PrefixMatch:
        """What a waiting sequence could go on from; see `PrefixIndex.match`.

        Copying a part of a free block takes one block more than computing it. Where that is one too
        many it is left out, or a sequence that just fits would never be admitted. A hybrid can't
        leave it out, so `check_fits` counts it.
        """
        match = self.prefixes.match(sequence)
        if self.growth.bounded:
            return match
        num_free_parts = sum(self.pool.ref_count[block] == 0 for block in match.partial)
        if num_free_parts and self.num_blocks_to_admit(sequence, match) > self.pool.num_free:
            match = match._replace(
                num_tokens=match.num_tokens // self.block_size * self.block_size,
                partial=(),
                num_revived=match.num_revived - num_free_parts,
            )
        return match

    # ---- getting blocks ---------------------------------------------------------------------

    def num_blocks_to_admit(self, sequence: Sequence, match: PrefixMatch) -> int:
        """Free blocks that `admit` takes: new ones, and matched ones that no table holds."""
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
        """Complete a sequence's tables: what it holds, matched blocks, new ones for the rest.

        Returns the copies of partly filled blocks and of states, for the plan of step_id: until
        that has ended their sources are held. The caller has checked num_blocks_to_admit.
        """
        pool, copied = self.pool, match.copied
        if self.growth.bounded:
            self.superseded.count_hit(sequence, match)
        for block in copied:
            pool.share(block)
        if self.growth.bounded:
            self.superseded.go_on(match)
        if not sequence.block_tables:
            sequence.block_tables = tuple([] for _ in range(self.num_groups))
        for table, ids in zip(sequence.block_tables, match.blocks, strict=True):
            for block in ids:
                if block != HOLE_BLOCK:
                    pool.share(block)
            table.extend(ids)
        sequence.num_slots = self.growth.num_slots(sequence)
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
            if digest is not None:  # else it goes on with the sequence that it forks from
                sequence.snapshot = Snapshot(match.num_tokens, digest)
        copies: list[BlockCopy] = []
        if self.copy_on_write.is_due(sequence):
            copies += self.copy_on_write.copy(sequence, step_id)[1]
        num_tokens = len(sequence.token_ids)
        for rule in self.growth.rules:
            table = sequence.block_tables[rule.group]
            missing = rule.num_reserved(num_tokens, end) - len(table)
            if missing > 0:
                table.extend(self._take(missing, sequence))
        sequence.num_slots = self.growth.num_slots(sequence)
        num_full = match.num_tokens // self.block_size
        self.prefixes.start_computing(sequence, num_full)
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
        """Make room for num_tokens tokens, and so many blocks more; all groups or none.

        Returns what the row's table gains (row -1 without one), or None where the pool has too few
        free blocks; then nothing was changed.
        """
        if num_tokens <= sequence.num_slots:
            return []
        end = -(-num_tokens // self.block_size) + num_extra_blocks
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
                taken = self._take(end - first, sequence)
                table.extend(taken)
                edits.append(TableEdit(row, group, EditKind.APPEND, first, tuple(taken)))
        sequence.num_slots = end * self.block_size
        return edits

    def forget_passed(self, sequence: Sequence) -> list[TableEdit]:
        """Free what windows have passed, of steps that have ended; returns the holes.

        It stays cached, but is taken first, unless a prefix ends there that others may go on from.
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
        """Give `child` all blocks of `parent` that have computed tokens. What it holds beyond the
        blocks that both have in common is released."""
        num_blocks = -(-parent.num_computed_tokens // self.block_size)
        self.prefixes.stop_computing(child, child.num_published_blocks, child.num_registered_blocks)
        if not child.block_tables:
            child.block_tables = tuple([] for _ in parent.block_tables)
        for rule in self.growth.rules:
            table, theirs = child.block_tables[rule.group], parent.block_tables[rule.group]
            end = num_blocks if rule.has_slots else len(theirs)
            same = 0
            if not rule.is_bounded:  # else entries before an equal one may differ
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
        child.num_slots = self.growth.num_slots(child)
        child.num_computed_tokens = parent.num_computed_tokens
        child.num_written_tokens = parent.num_written_tokens
        child.num_published_blocks = parent.num_published_blocks
        child.num_registered_blocks = 0
        child.anchors = parent.anchors
        child.chain[:], child.chain_tokens[:] = parent.chain, parent.chain_tokens
        child.public_chain[:] = parent.public_chain
        is_shared = bool(parent.num_computed_tokens % self.block_size or self.growth.states)
        child.shares_tail = parent.shares_tail = is_shared

    def _take(self, count: int, sequence: Sequence) -> list[int]:
        taken, evicted = self.pool.take(count)
        if evicted:
            self.num_evicted_blocks += len(evicted)
            self.cache.remove_run(evicted, Eviction(self.now_s, sequence.request_id))
            if self.growth.states:
                self.snapshots.forget_rest(evicted)
            if self.growth.bounded:
                self.ends.lose(evicted)
        return taken

    # ---- giving blocks back -----------------------------------------------------------------

    def num_kept_blocks(self, sequence: Sequence, num_wanted: int) -> int:
        """How many blocks of each group are left when so many at the end are cut that num_wanted
        become free; 0 if even all would not do."""
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

    def give_up(self, sequence: Sequence, num_kept: int, num_wanted: int) -> int:
        """Take from a preempted sequence the blocks from num_kept on, which it does not need, and
        from its end as many more as num_wanted free blocks take; returns as `truncate`."""
        num_freed = self.truncate(sequence, num_kept)
        if num_freed < num_wanted:
            num_kept = self.num_kept_blocks(sequence, num_wanted - num_freed)
            num_freed += self.truncate(sequence, num_kept)
        return num_freed

    def truncate(self, sequence: Sequence, num_kept: int) -> int:
        """Take the blocks from num_kept on, of each group; returns how many became free, or will
        when the step in flight that reads them has ended.

        The chain's tail goes first, so that it is evicted before the prefix that others share.
        Where windows or states can't go on from there, all goes, and what is cached may be found.
        """
        tables, growth = sequence.block_tables, self.growth
        if not tables:
            return 0
        growing = [tables[rule.group] for rule in growth.growing]
        longest, computed = max(map(len, growing), default=0), sequence.num_computed_tokens
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
        slots = num_kept * self.block_size
        sequence.num_computed_tokens = min(computed, slots)
        sequence.num_written_tokens = min(sequence.num_written_tokens, slots)
        sequence.num_published_blocks = min(sequence.num_published_blocks, num_kept)
        ref_count = self.pool.ref_count
        num_freed = list(map(ref_count.__getitem__, blocks)).count(1)
        if self.deferred.is_in_flight(sequence.last_step_id):
            self.deferred.hold(sequence.last_step_id, blocks)
        else:
            self.pool.release_all(blocks)
        return num_freed

    def free(self, sequence: Sequence) -> None:
        """Take all blocks of a sequence back, at once or when the step that reads them has ended.

        What its last block holds stays findable too, if it is only partly filled: unless it comes
        with a copy that is yet to be made, which would not come if the step fails. States that the
        step in flight brings are waited for, where all their tokens are known.
        """
        if self.moves is not None:
            self.moves.loads.release(sequence)
        is_last = sequence.num_computed_tokens == len(sequence.token_ids)
        if self.snapshots.enabled and is_last and self.deferred.is_in_flight(sequence.last_step_id):
            self.leaving.append(sequence)
            return
        self._leave(sequence, keeps_tail=True)

    def _leave(self, sequence: Sequence, *, keeps_tail: bool) -> None:
        index, tables = sequence.num_written_tokens // self.block_size, sequence.block_tables
        growing = [tables[rule.group] for rule in self.growth.growing if tables]
        last = [table[index] for table in growing if index < len(table)]
        last += [page for rule in self.growth.states if tables for page in tables[rule.group]]
        if keeps_tail and not any(map(self.deferred.is_incomplete, last)):
            self.prefixes.publish_tail(sequence)
            if self.growth.bounded and self.config.enable_prefix_caching:
                self.superseded.leave_ends(sequence, sequence.num_written_tokens)
        self.truncate(sequence, 0)
        sequence.block_tables = ()

    def publish(self, sequence: Sequence, num_written_tokens: int) -> None:
        """Make the full blocks among the first num_written_tokens findable by their content."""
        self.prefixes.publish(sequence, num_written_tokens)

    def set_time(self, now_s: float) -> None:
        """The engine's clock, before each step is planned: when blocks are evicted, pins end, and
        moves go on."""
        self.now_s = self.pool.now_s = now_s
        if self.moves is not None:
            self.moves.go_on(now_s)

    def end_step(self, step_id: int, *, has_failed: bool = False) -> None:
        """Release what steps up to step_id held; they end in the order of their ids.

        has_failed: the plan of the next step is given up, too, so that its copies are not made.
        """
        ended = [gone for gone in self.leaving if gone.last_step_id <= step_id or has_failed]
        self.deferred.end_step(step_id, has_failed=has_failed)
        for sequence in ended:
            self.leaving.remove(sequence)
            if not has_failed:
                sequence.num_written_tokens = sequence.num_computed_tokens
                self.publish(sequence, sequence.num_written_tokens)
            # What a step that failed was to write, or to copy, did not come.
            self._leave(sequence, keeps_tail=not has_failed)


def _start_from(sequence: Sequence, match: PrefixMatch, block_size: int) -> None:
    """Count what was matched as computed, and as written and published as far as it is."""
    held = sequence.num_computed_tokens
    num_written = max(held, match.num_written_tokens)
    if sequence.num_published_blocks == held // block_size:
        sequence.num_published_blocks = num_written // block_size
    if sequence.num_written_tokens == held:
        sequence.num_written_tokens = num_written
    sequence.num_computed_tokens = match.num_tokens


def _first_end(sequence: Sequence, match: PrefixMatch, block_size: int) -> int:
    """The end of the first block that it will compute; of all, where that is done at once."""
    if sequence.is_in_one_step:
        return len(sequence.token_ids)
    return (match.num_tokens // block_size + 1) * block_size


KVManagerFactory = Callable[[KVCacheConfig, int], KVCacheManager]
"""(config, max_model_len) -> the manager of an engine's memory; see `assembly.build`."""


def paged_manager(config: KVCacheConfig, max_model_len: int) -> KVCacheManager:
    """The factory that an engine uses unless it is handed another."""
    return KVCacheManager(config)
