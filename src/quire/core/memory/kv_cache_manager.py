"""The block tables of all sequences, by KV group.

A sequence's tables grow in all groups together, since every group stores every token. Blocks that
a step in flight may still read are not freed with their sequence: their reference passes to that
step and ends with it. So does that of a block from which the coming step copies.
"""

from collections.abc import Callable
from dataclasses import dataclass

from quire.core.kv_groups import KVGroup
from quire.core.memory.block_pool import BlockPool, DeferredFrees
from quire.core.memory.eviction import DEFAULT_ORDER, find_order
from quire.core.memory.prefix_cache import PrefixCache
from quire.core.memory.prefix_index import PrefixIndex, PrefixMatch
from quire.core.sequence import Eviction, Sequence
from quire.core.step import BlockCopy, EditKind, TableEdit
from quire.errors import RequestNeverFitsError

# At least so many evictions are remembered: when, and for which request.
MIN_REMEMBERED = 4096


@dataclass(frozen=True, slots=True)
class KVCacheConfig:
    """What the memory is made of.

    num_blocks: pages in the pool, shared by all groups. block_size: tokens in a block of one group.
    secret: keys the content hashes (16 random bytes of the installation, or of this process).
    eviction: which cached contents are forgotten first; a name in `core.memory.eviction`.
    """

    groups: tuple[KVGroup, ...]
    num_blocks: int
    block_size: int = 16
    enable_prefix_caching: bool = True
    secret: bytes = b""
    eviction: str = DEFAULT_ORDER


class KVCacheManager:
    """Gives blocks to sequences and takes them back.

    Invariant: a block's reference count is the number of table entries that name it plus the number
    of entries in `holds`; `invariants.check_memory` says so after any step.

    num_blocks_to_grow: blocks that a sequence takes at once when it outgrows its tables; 0 if it
        never does.
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
        self.pool = BlockPool(config.num_blocks, find_order(config.eviction))
        self.cache = PrefixCache(
            self.num_groups,
            config.block_size,
            config.secret,
            num_remembered=max(config.num_blocks, MIN_REMEMBERED),
        )
        self.prefixes = PrefixIndex(
            self.cache, self.pool, self.num_groups, config.enable_prefix_caching
        )
        self.deferred = DeferredFrees(self.pool)
        self.num_blocks_to_grow = self.num_groups
        self.padding: dict[Sequence, int] = {}
        self.num_padding_blocks = 0
        self.num_evicted_blocks = 0
        self.now_s = 0.0  # for what is remembered of evictions

    @property
    def num_free_soon(self) -> int:
        """Blocks that are free, or may be when the steps in flight have ended."""
        return self.pool.num_free + self.deferred.num_blocks

    def blocks_for(self, num_tokens: int) -> int:
        """Pages that num_tokens tokens of one sequence occupy, over all groups."""
        return -(-num_tokens // self.block_size) * self.num_groups

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
        needed = width * self.blocks_for(sequence.max_num_tokens - 1)
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
        many it is left out, or a sequence that just fits would never be admitted.
        """
        match = self.prefixes.match(sequence)
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
        num_there = sum(map(len, match.blocks)) + sum(map(len, sequence.block_tables))
        needed = self.blocks_for(len(sequence.token_ids)) - num_there + match.num_revived
        return needed + self.num_groups * self.must_copy_tail(sequence)

    def admit(self, sequence: Sequence, match: PrefixMatch, step_id: int) -> list[BlockCopy]:
        """Complete a sequence's tables: what it holds, matched blocks, new ones for the rest.

        Returns the copies of partly filled blocks, for the plan of step_id: until that has ended
        their sources are held. The caller has checked num_blocks_to_admit.
        """
        pool = self.pool
        for block in match.partial:
            pool.share(block)
        if not sequence.block_tables:
            sequence.block_tables = tuple([] for _ in range(self.num_groups))
        for table, ids in zip(sequence.block_tables, match.blocks, strict=True):
            for block in ids:
                pool.share(block)
            table.extend(ids)
        sequence.num_slots = len(sequence.block_tables[0]) * self.block_size
        if sequence.num_admissions == 0:
            self.prefixes.count(sequence, match)
        sequence.num_admissions += 1
        _start_from(sequence, match, self.block_size)
        copies: list[BlockCopy] = []
        if self.must_copy_tail(sequence):
            copies += self.copy_tail(sequence, step_id)[1]
        edits = self.grow(sequence, len(sequence.token_ids))
        assert edits is not None, "admit without enough free blocks"
        num_full = match.num_tokens // self.block_size
        self.prefixes.start_computing(sequence, num_full)
        if match.partial:
            targets = (table[num_full] for table in sequence.block_tables)
            partial = [BlockCopy(*pair) for pair in zip(match.partial, targets, strict=True)]
            self.deferred.hold_copied(step_id, partial)
            copies += partial
        return copies

    def grow(
        self, sequence: Sequence, num_tokens: int, num_extra_blocks: int = 0
    ) -> list[TableEdit] | None:
        """Make room for num_tokens tokens, and so many blocks more; all groups or none.

        Returns what the row's table gains (row -1 without one), or None where the pool has too few
        free blocks; then nothing was changed.
        """
        first = sequence.num_slots // self.block_size
        missing = -(-num_tokens // self.block_size) - first
        if missing <= 0:
            return []
        missing += num_extra_blocks
        if missing * self.num_groups > self.pool.num_free:
            return None
        row = -1 if sequence.row is None else sequence.row
        edits: list[TableEdit] = []
        for group, table in enumerate(sequence.block_tables):
            taken = self._take(missing, sequence)
            table.extend(taken)
            edits.append(TableEdit(row, group, EditKind.APPEND, first, tuple(taken)))
        sequence.num_slots += missing * self.block_size
        return edits

    def must_copy_tail(self, sequence: Sequence) -> bool:
        """Whether the partly filled block that the next token goes into has other holders."""
        if not sequence.shares_tail:
            return False
        index, offset = divmod(sequence.num_computed_tokens, self.block_size)
        ref_count, num_copied_from = self.pool.ref_count, self.deferred.num_copied_from
        sequence.shares_tail = bool(offset) and any(
            ref_count[table[index]] - num_copied_from[table[index]] > 1
            for table in sequence.block_tables
        )
        return sequence.shares_tail

    def copy_tail(
        self, sequence: Sequence, step_id: int
    ) -> tuple[list[TableEdit], list[BlockCopy]]:
        """Copy on write: replace the partly filled last block by a copy that is the sequence's own.

        The caller has checked that a block of each group is free. The old one stays held until
        step_id, which copies it, has ended.
        """
        row = -1 if sequence.row is None else sequence.row
        index = sequence.num_computed_tokens // self.block_size
        edits: list[TableEdit] = []
        copies: list[BlockCopy] = []
        for group, table in enumerate(sequence.block_tables):
            target = self._take(1, sequence)[0]
            source, table[index] = table[index], target
            copies.append(BlockCopy(source, target))
            edits.append(TableEdit(row, group, EditKind.REPLACE, index, (target,)))
        self.deferred.hold_copied(step_id, copies)
        sequence.shares_tail = False
        return edits, copies

    def fork(self, child: Sequence, parent: Sequence) -> None:
        """Give `child` all blocks of `parent` that have computed tokens. What it holds beyond the
        blocks that both have in common is released."""
        num_blocks = -(-parent.num_computed_tokens // self.block_size)
        self.prefixes.stop_computing(child, child.num_published_blocks, child.num_registered_blocks)
        if not child.block_tables:
            child.block_tables = tuple([] for _ in parent.block_tables)
        for table, theirs in zip(child.block_tables, parent.block_tables, strict=True):
            same = min(len(table), num_blocks)
            while same and table[same - 1] != theirs[same - 1]:
                same -= 1
            for block in theirs[same:num_blocks]:
                self.pool.share(block, is_use=False)
            for block in reversed(table[same:]):
                self.pool.release(block)
            table[same:] = theirs[same:num_blocks]
        child.num_slots = len(child.block_tables[0]) * self.block_size
        child.num_computed_tokens = parent.num_computed_tokens
        child.num_written_tokens = parent.num_written_tokens
        child.num_published_blocks = parent.num_published_blocks
        child.num_registered_blocks = 0
        child.chain[:], child.chain_tokens[:] = parent.chain, parent.chain_tokens
        child.public_chain[:] = parent.public_chain
        child.shares_tail = parent.shares_tail = parent.num_computed_tokens % self.block_size != 0

    def _take(self, count: int, sequence: Sequence) -> list[int]:
        taken, evicted = self.pool.take(count)
        if evicted:
            self.num_evicted_blocks += len(evicted)
            self.cache.remove_run(evicted, Eviction(self.now_s, sequence.request_id))
        return taken

    # ---- giving blocks back -----------------------------------------------------------------

    def num_kept_blocks(self, sequence: Sequence, num_wanted: int) -> int:
        """How many blocks of each group are left when so many at the end are cut that num_wanted
        become free; 0 if even all would not do."""
        ref_count = self.pool.ref_count
        kept = sequence.num_slots // self.block_size
        while kept and num_wanted > 0:
            kept -= 1
            num_wanted -= sum(ref_count[table[kept]] == 1 for table in sequence.block_tables)
        return 0 if num_wanted > 0 else kept

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
        """
        if num_kept * self.block_size >= sequence.num_slots:
            return 0
        self.prefixes.stop_computing(
            sequence, sequence.num_published_blocks, sequence.num_registered_blocks
        )
        cut = [table[num_kept:] for table in sequence.block_tables]
        for table in sequence.block_tables:
            del table[num_kept:]
        blocks: list[int] = [block for at in zip(*map(reversed, cut), strict=True) for block in at]
        sequence.num_slots = slots = num_kept * self.block_size
        sequence.num_computed_tokens = min(sequence.num_computed_tokens, slots)
        sequence.num_written_tokens = min(sequence.num_written_tokens, slots)
        sequence.num_published_blocks = min(sequence.num_published_blocks, num_kept)
        ref_count = self.pool.ref_count
        num_freed: int = sum(ref_count[block] == 1 for block in blocks)
        if self.deferred.is_in_flight(sequence.last_step_id):
            self.deferred.hold(sequence.last_step_id, blocks)
        else:
            self.pool.release_all(blocks)
        return num_freed

    def free(self, sequence: Sequence) -> None:
        """Take all blocks of a sequence back, at once or when the step that reads them has ended.

        What its last block holds stays findable too, if it is only partly filled: unless it comes
        with a copy that is yet to be made, which would not come if the step fails.
        """
        index = sequence.num_written_tokens // self.block_size
        last = [table[index] for table in sequence.block_tables if index < len(table)]
        if not any(map(self.deferred.is_incomplete, last)):
            self.prefixes.publish_tail(sequence)
        self.truncate(sequence, 0)
        sequence.block_tables = ()

    def publish(self, sequence: Sequence, num_written_tokens: int) -> None:
        """Make the full blocks among the first num_written_tokens findable by their content."""
        self.prefixes.publish(sequence, num_written_tokens)

    def set_time(self, now_s: float) -> None:
        """The engine's clock, before each step is planned: when blocks are evicted, pins end."""
        self.now_s = self.pool.now_s = now_s

    def end_step(self, step_id: int, *, has_failed: bool = False) -> None:
        """Release what steps up to step_id held; they end in the order of their ids.

        has_failed: the plan of the next step is given up, too, so that its copies are not made.
        """
        self.deferred.end_step(step_id, has_failed=has_failed)


def _start_from(sequence: Sequence, match: PrefixMatch, block_size: int) -> None:
    """Count what was matched as computed, and as written and published as far as it is."""
    held = sequence.num_computed_tokens
    num_written = max(held, match.num_written_tokens)
    if sequence.num_published_blocks == held // block_size:
        sequence.num_published_blocks = num_written // block_size
    if sequence.num_written_tokens == held:
        sequence.num_written_tokens = num_written
    sequence.num_computed_tokens = match.num_tokens


KVManagerFactory = Callable[[KVCacheConfig, int], KVCacheManager]
"""(config, max_model_len) -> the manager of an engine's memory; see `assembly.build`."""


def paged_manager(config: KVCacheConfig, max_model_len: int) -> KVCacheManager:
    """The factory that an engine uses unless it is handed another."""
    return KVCacheManager(config)
