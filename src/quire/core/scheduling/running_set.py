"""Manages running and preempted sequences: their rows, their slots for new tokens, and preemption.

The scheduler and admission decide which sequence gets rows and blocks, and call this module.

Progress: the ranks of sequences that have run are a total order that never changes. A sequence
takes blocks from sequences that it outranks, the last-ranked first: blocks reserved ahead, then
blocks loaded for waiting sequences, then prefixes that preempted sequences still hold, then the
tails of running ones. Blocks loaded for a sequence that has never run may be taken by any sequence
that has. Blocks for drafts are reserved ahead, but are not taken while a step in flight writes
them. So the first-ranked sequence can get the whole pool, which is large enough for it, and no
other sequence takes its blocks. So it ends, and the next sequence becomes first.
"""

import heapq
from bisect import bisect_left, insort
from dataclasses import dataclass

from quire.core.adapters import NO_SLOT
from quire.core.memory.kv_cache_manager import KVCacheManager
from quire.core.scheduling.content_loads import ContentLoads
from quire.core.scheduling.plan_builder import PlanBuilder
from quire.core.scheduling.residency import Residency
from quire.core.scheduling.waiting import WaitingQueue
from quire.core.sequence import Sequence, SequenceState
from quire.core.step import EditKind, TableEdit


@dataclass(slots=True)
class PreemptionStats:
    """Counts of preemptions since the start."""

    #: Number of preemptions, including those by failed steps.
    num_preemptions: int = 0
    #: Number of tokens that preempted sequences had computed: the loss if all their blocks were
    #: taken.
    num_preempted_tokens: int = 0
    #: Number of tokens that were computed again after a preemption.
    num_recomputed_tokens: int = 0


class RunningSet:
    """The running sequences, and the preempted ones with the blocks that they keep.

    Invariant: `running` and `preempted` are sorted by rank and disjoint. A sequence is in `running`
    if and only if it has a row, and in `preempted` if and only if it is PREEMPTED (it is in the
    waiting queue, too). Each row belongs to one running sequence or is in `free_rows`.
    """

    def __init__(
        self,
        num_rows: int,
        memory: KVCacheManager,
        builder: PlanBuilder,
        waiting: WaitingQueue,
        adapters: Residency,
        contents: Residency,
    ) -> None:
        """adapters: the slots of LoRA adapters. contents: the slots of prompts' contents."""
        self.adapters = adapters
        self.content_loads = ContentLoads(contents, builder)
        self.running: list[Sequence] = []
        self.preempted: list[Sequence] = []
        #: A heap of the rows without a sequence.
        self.free_rows = list(range(num_rows))
        #: Number of running sequences with a grammar.
        self.num_constrained = 0
        #: How often a sequence lost its row.
        self.num_released = 0
        self.stats = PreemptionStats()
        self._memory = memory
        self._builder = builder
        self._waiting = waiting
        #: Running sequences that may have blocks reserved ahead.
        self._reserving: set[Sequence] = set()

    @property
    def is_idle(self) -> bool:
        """Whether no running sequence can compute before a waiting one is admitted.

        True if none runs, or if all are beams that wait for other beams of their search.
        """
        return all(
            sequence.is_beam
            and not sequence.num_pending_tokens
            and sequence.num_computed_tokens == sequence.num_tokens
            for sequence in self.running
        )

    @property
    def num_room(self) -> int:
        """Number of further sequences for which there are rows and free blocks.

        Assumes the average number of blocks of a running sequence, and ignores the other admission
        checks.
        """
        pool, num_free_rows = self._memory.pool, len(self.free_rows)
        num_held = pool.num_held
        if not num_held:
            return num_free_rows
        return min(num_free_rows, pool.num_free * len(self.running) // num_held)

    def add_demand(self, sequence: Sequence) -> None:
        """Count the adapter and the contents of a sequence that the scheduler accepted."""
        self.adapters.add_demand(sequence.adapter)
        for digest in {span.digest for span in sequence.content_spans}:
            self.content_loads.residency.add_demand(digest)

    def end_demand(self, sequence: Sequence) -> None:
        """Stop counting the adapter and the contents of a sequence that has ended."""
        self.adapters.end_demand(sequence.adapter)
        for digest in {span.digest for span in sequence.content_spans}:
            self.content_loads.residency.end_demand(digest)

    # ---- rows -------------------------------------------------------------------------------

    def assign_row(self, sequence: Sequence) -> None:
        """Give a free row to a sequence whose tables are complete."""
        if sequence.state is SequenceState.PREEMPTED:
            remove_ranked(self.preempted, sequence)
            lost = sequence.num_lost_tokens - sequence.num_computed_tokens
            self.stats.num_recomputed_tokens += max(0, lost)
        sequence.row = heapq.heappop(self.free_rows)
        sequence.move_to(SequenceState.RUNNING)
        insort(self.running, sequence, key=rank_of)
        self.num_constrained += sequence.constraint is not None
        sequence.adapter_slot = self.adapters.acquire(sequence.adapter)
        load = self.adapters.take_load(sequence.adapter)
        if load is not None:
            self._builder.adapter_loads.append(load)

    def remove(self, sequence: Sequence) -> None:
        """Free the row and all blocks of a sequence that ends."""
        if sequence.state is SequenceState.RUNNING:
            self._release_row(sequence)
        elif sequence.state is SequenceState.PREEMPTED:
            remove_ranked(self.preempted, sequence)
        self._memory.free(sequence)

    def preempt(self, sequence: Sequence, num_wanted: int) -> None:
        """Move a running sequence to PREEMPTED: it loses its row, its reserved blocks, and as many
        blocks at its end as are needed for num_wanted to become free. Its tokens stay.

        All beams of one search are preempted together, since the rows of some beams may still have
        to be copied from the rows of others.
        """
        members = [sequence]
        if sequence.is_beam:
            members = [
                beam
                for beam in self.running
                if beam.is_beam and beam.request_id == sequence.request_id
            ]
        for member in reversed(members):
            num_wanted -= self.preempt_alone(member, num_wanted)

    def preempt_alone(self, sequence: Sequence, num_wanted: int) -> int:
        """`preempt` for this sequence only, even if it is a beam; returns the number of blocks that
        become free."""
        memory, block_size = self._memory, self._memory.block_size
        self.stats.num_preemptions += 1
        self.stats.num_preempted_tokens += sequence.num_computed_tokens
        sequence.num_lost_tokens = sequence.num_computed_tokens
        self._release_row(sequence)
        num_kept = -(-sequence.num_computed_tokens // block_size)
        if sequence.needs_whole_prompt and not sequence.num_pending_tokens:
            # The results of a step in flight are dropped, so their positions are computed again.
            num_kept = min(num_kept, sequence.num_resumable_tokens // block_size)
        num_freed = memory.release_tail(sequence, num_kept, num_wanted)
        self.add_preempted(sequence)
        return num_freed

    def add_preempted(self, sequence: Sequence) -> None:
        """Let a sequence wait as PREEMPTED, with the blocks that it has."""
        _drop_prompt_logprobs(sequence)
        sequence.move_to(SequenceState.PREEMPTED)
        insort(self.preempted, sequence, key=rank_of)
        self._waiting.add(sequence)

    def drop_rows(self) -> None:
        """Move all running sequences to PREEMPTED after a failed step, since the runner has no
        rows.

        They keep the tokens that are known to be written; results of steps in flight will not come.
        """
        self._builder.clear()
        for sequence in [*self.running, *self._waiting]:
            sequence.num_pending_tokens, sequence.draft_token_ids = 0, ()
        for sequence in list(self.running):
            self.preempt_alone(sequence, 0)
        for sequence in self.preempted:
            # After a failed step no state can be trusted, not even one that the step was only to
            # copy.
            num_kept = 0 if self._memory.growth.states else sequence.num_published_blocks
            if sequence.needs_whole_prompt:
                num_kept = min(num_kept, sequence.num_resumable_tokens // self._memory.block_size)
            self._memory.truncate(sequence, num_kept)
            _drop_prompt_logprobs(sequence)
        self.adapters.clear()
        self.content_loads.residency.clear()
        self._builder.clear()

    def free_adapter_slot(self, needy: Sequence, *, from_all: bool = False) -> None:
        """Let the adapter of a waiting sequence get a slot.

        If all slots are in use, the adapters are ordered by their first-ranked sequences. All
        sequences of the last adapter are preempted if `needy` outranks them. from_all: ignore the
        rank of `needy`.
        """
        if self.adapters.has_slot_for(needy.adapter):
            return
        first_users: dict[str, Sequence] = {}
        for sequence in self.running:
            if sequence.adapter:
                first_users.setdefault(sequence.adapter, sequence)
        if not first_users:
            return  # all adapters in slots are still being read, for sequences that have ended
        last = max(first_users.values(), key=rank_of)
        if not from_all and last.rank < needy.rank:
            return
        for sequence in [each for each in reversed(self.running) if each.adapter == last.adapter]:
            if sequence.row is not None:  # a beam may have been preempted with another
                self.preempt(sequence, 0)

    def _release_row(self, sequence: Sequence) -> None:
        assert sequence.row is not None
        self.num_released += 1
        self.num_constrained -= sequence.constraint is not None
        remove_ranked(self.running, sequence)
        self.adapters.release(sequence.adapter)
        sequence.adapter_slot = NO_SLOT
        self._reserving.discard(sequence)
        self._builder.release(sequence.row)
        heapq.heappush(self.free_rows, sequence.row)
        sequence.row = None
        sequence.end_plain()

    # ---- blocks -----------------------------------------------------------------------------

    def record_reserve(self, sequence: Sequence) -> None:
        """Remember that a sequence has blocks beyond its present need, which `reclaim` takes
        first."""
        self._reserving.add(sequence)

    def reclaim(
        self, num_wanted: int, needy: Sequence, *, from_running: bool, from_all: bool = False
    ) -> bool:
        """Make num_wanted blocks free for the sequence `needy`; returns whether they are free now.

        Some may become free only when steps in flight have ended. If the blocks of all lower-ranked
        sequences do not suffice, all of them are taken. from_running: also preempt. from_all:
        ignore the rank of `needy`.
        """
        pool, rank = self._memory.pool, () if from_all else needy.rank
        if pool.num_free >= num_wanted:
            return True
        # First, take blocks that no running sequence needs now; the cheapest to lose go first.
        self._reclaim_reserves(num_wanted)
        self._reclaim_loaded(num_wanted, needy, rank)
        self._reclaim_preempted(num_wanted, needy, rank)
        num_missing = num_wanted - pool.num_free
        if from_running and num_missing > 0 and self._memory.moves is not None:
            self._memory.moves.stores.cancel_last(num_missing)
        # Then preempt running sequences, from the last-ranked on.
        while (
            from_running
            and self._memory.num_free_soon < num_wanted
            and self.running
            and self.running[-1].rank > rank
        ):
            self.preempt(self.running[-1], num_wanted - self._memory.num_free_soon)
        return pool.num_free >= num_wanted

    def reclaim_from_all(self, sequence: Sequence, num_wanted: int) -> None:
        """Take blocks from all other sequences, at any rank, until num_wanted are free for a
        running one.

        Called while no step is in flight.
        """
        pool, others = self._memory.pool, [other for other in self.running if other is not sequence]
        while pool.num_free < num_wanted and others:
            self.preempt_alone(others.pop(), num_wanted - pool.num_free)
        self.reclaim(num_wanted, sequence, from_running=False, from_all=True)

    def _reclaim_reserves(self, num_wanted: int) -> None:
        memory = self._memory
        for sequence in sorted(self._reserving, key=rank_of, reverse=True):
            if memory.num_free_soon >= num_wanted:
                return
            if sequence.draft_token_ids:
                continue  # a step in flight writes its drafts into these blocks
            self._reserving.discard(sequence)
            # Blocks that the coming step writes are in use, even if it is planned already.
            num_used = -(-sequence.num_tokens // memory.block_size)
            if num_used * memory.block_size < sequence.num_slots:
                assert sequence.row is not None
                memory.truncate(sequence, num_used)
                self._builder.edit_tables(
                    [
                        TableEdit(sequence.row, rule.group, EditKind.TRUNCATE, num_used)
                        for rule in memory.growth.growing
                    ]
                )

    def loading(self, needy: Sequence, rank: tuple[float, ...]) -> list[Sequence]:
        """Waiting sequences with loaded blocks that `needy` may take, the last-ranked first.

        `needy` may take from sequences that it outranks and, if it has ever run, from all sequences
        that never ran.
        """
        moves = self._memory.moves
        if moves is None:
            return []
        has_run = needy.num_admissions > 0
        behind = [
            sequence
            for sequence in moves.loads.sequences
            if sequence is not needy
            and (sequence.rank > rank or (has_run and sequence.num_admissions == 0))
        ]
        return sorted(behind, key=rank_of, reverse=True)

    def _reclaim_loaded(self, num_wanted: int, needy: Sequence, rank: tuple[float, ...]) -> None:
        moves = self._memory.moves
        # Blocks loaded for `needy` itself are taken last. No sequence can use blocks that follow a
        # failed load.
        for sequence in (*self.loading(needy, rank), needy):
            if self._memory.num_free_soon >= num_wanted or moves is None:
                return
            moves.loads.abandon(sequence)

    def _reclaim_preempted(self, num_wanted: int, needy: Sequence, rank: tuple[float, ...]) -> None:
        memory = self._memory
        first = bisect_left(self.preempted, rank, key=rank_of)
        for sequence in reversed(self.preempted[first:]):
            missing = num_wanted - memory.num_free_soon
            if missing <= 0:
                return
            if sequence is not needy:
                num_kept = memory.num_kept_blocks(sequence, missing)
                memory.truncate(sequence, num_kept)
                _drop_prompt_logprobs(sequence)


def _drop_prompt_logprobs(sequence: Sequence) -> None:
    """Forget the prompt log-probabilities of positions that will be computed again.

    Forks keep theirs.
    """
    if sequence.needs_prompt_logprobs and not sequence.num_pending_tokens:
        sequence.prompt_logprobs = sequence.prompt_logprobs[: sequence.num_computed_tokens]


def constrained(running_set: RunningSet) -> list[Sequence]:
    """The running sequences with a grammar, by rank."""
    if not running_set.num_constrained:
        return []
    return [sequence for sequence in running_set.running if sequence.constraint is not None]


def rank_of(sequence: Sequence) -> tuple[float, ...]:
    """The sort key of lists of sequences."""
    return sequence.rank


def remove_ranked(ranked: list[Sequence], sequence: Sequence) -> None:
    """Remove a sequence from a list sorted by rank; ranks are unique."""
    index = bisect_left(ranked, sequence.rank, key=rank_of)
    assert ranked[index] is sequence
    del ranked[index]


class AppendSlots:
    """Grows tables and copies shared blocks for decoding sequences.

    Blocks come from the lowest-ranked sequences if the pool is short.
    """

    def __init__(
        self,
        memory: KVCacheManager,
        running_set: RunningSet,
        builder: PlanBuilder,
        num_lookahead_blocks: int,
    ) -> None:
        """num_lookahead_blocks: blocks reserved beyond the one that is needed, while much memory is
        free."""
        self._memory = memory
        self._running_set = running_set
        self._builder = builder
        self._num_lookahead_blocks = num_lookahead_blocks

    def make_writable(self, sequence: Sequence, step_id: int) -> bool:
        """Get slots for one more token and for all tokens that must be computed with it, in blocks
        that belong to this sequence alone.

        Shared blocks are copied and full tables grow; if the pool is short, blocks are taken from
        lower-ranked sequences. Returns whether there are slots.
        """
        memory = self._memory
        num_wanted = memory.num_blocks_to_grow
        if sequence.shares_tail and memory.copy_on_write.is_due(sequence):
            num_wanted = memory.copy_on_write.num_blocks([sequence])
        elif sequence.next_cut <= sequence.num_slots:
            return True
        elif memory.growth.windows:  # only some of the tables may be full
            num_wanted = memory.copy_on_write.num_blocks([sequence])
        if not self.find_blocks(num_wanted, sequence):
            return False
        self.append(sequence, step_id)
        return True

    def find_blocks(self, num_wanted: int, sequence: Sequence) -> bool:
        """Make num_wanted blocks free for a running sequence; returns whether they are free now.

        If not, and blocks that steps in flight will free may suffice, the sequence pauses.
        Otherwise it is preempted, because it is the last-ranked sequence left.
        """
        has_found = self._running_set.reclaim(num_wanted, sequence, from_running=True)
        if has_found or sequence.row is None:  # a beam may have been preempted with another
            return has_found and sequence.row is not None
        if self._memory.num_free_soon < num_wanted:
            self._running_set.preempt(sequence, 0)
        return False

    def append(self, sequence: Sequence, step_id: int) -> None:
        """Add slots for the next token and for all tokens that must be computed with it; the caller
        has found the blocks.

        Copies the shared parts of its last block and its state, and grows full tables.
        """
        memory, builder = self._memory, self._builder
        if sequence.shares_tail and memory.copy_on_write.is_due(sequence):
            edits, copies = memory.copy_on_write.copy(sequence, step_id)
            builder.edit_tables(edits)
            builder.copy(copies)
        wanted = sequence.next_cut
        if wanted <= sequence.num_slots:
            return
        # While over a quarter of the pool is free, reserve blocks ahead.
        num_extra = 0
        pool = memory.pool
        if pool.num_free * 4 > pool.num_blocks and not sequence.forks and not sequence.is_beam:
            last, end = (
                -(-count // memory.block_size) for count in (sequence.max_num_tokens - 1, wanted)
            )
            num_left = last - end
            num_new = end - sequence.num_slots // memory.block_size
            most = pool.num_free // memory.num_blocks_to_grow - num_new
            num_extra = max(0, min(self._num_lookahead_blocks, num_left, most))
        grown = memory.grow(sequence, wanted, num_extra)
        assert grown is not None, "blocks were found, but are not there"
        builder.edit_tables(grown)
        if num_extra:
            self._running_set.record_reserve(sequence)

    def most_after(self, sequence: Sequence) -> int:
        """Maximum number of tokens by which the sequence could grow now.

        Counts its unused slots and the pool's free blocks. Does not count free blocks with pinned
        contents, nor the blocks that each running sequence needs to grow once.
        """
        pool, num_at_once = self._memory.pool, self._memory.num_blocks_to_grow
        num_slots = sequence.num_slots - sequence.num_tokens
        if not num_at_once:  # it has all its slots
            return num_slots
        num_spare = len(self._running_set.running) * num_at_once
        num_free = max(0, pool.num_free - pool.num_free_pinned - num_spare)
        return num_slots + num_free // num_at_once * self._memory.block_size

    def reserve(self, sequence: Sequence, num_tokens: int) -> None:
        """Get slots for num_tokens further tokens of a sequence, at most `most_after`.

        The new blocks count as reserved ahead.
        """
        grown = self._memory.grow(sequence, sequence.num_tokens + num_tokens)
        assert grown is not None, "free blocks were counted, but are not there"
        if grown:
            self._builder.edit_tables(grown)
            self._running_set.record_reserve(sequence)
