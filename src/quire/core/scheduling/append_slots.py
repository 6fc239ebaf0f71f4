"""Slots that running sequences may write: one more block, or a copy of one that others read.

Used by the scheduler alone, for sequences that decode.
"""

from quire.core.memory.kv_cache_manager import KVCacheManager
from quire.core.scheduling.beams.scheduling import BeamScheduling
from quire.core.scheduling.plan_builder import PlanDraft
from quire.core.scheduling.running_set import Residents, rank_of
from quire.core.sequence import Sequence


class SlotProvider:
    """Grows tables and copies on write, at the expense of whoever ranks lowest.

    num_lookahead_blocks: reserved beyond the block that is needed, while memory is plenty.
    """

    def __init__(
        self,
        memory: KVCacheManager,
        residents: Residents,
        beams: BeamScheduling,
        draft: PlanDraft,
        num_lookahead_blocks: int,
    ) -> None:
        self._memory = memory
        self._residents = residents
        self._beams = beams
        self._draft = draft
        self._num_lookahead_blocks = num_lookahead_blocks

    def make_writable(self, sequence: Sequence, step_id: int) -> bool:
        """A slot for one more token that no other sequence reads: a copy of a shared block, or one
        more in each group, taken from the least important sequences if need be."""
        must_copy = self._memory.must_copy_tail(sequence)
        if not must_copy and sequence.num_computed_tokens < sequence.num_slots:
            return True
        if not self._find_blocks(self._memory.num_groups, sequence):
            return False
        self._write_on(sequence, must_copy, step_id)
        return True

    def make_beams_writable(self, sequence: Sequence, step_id: int) -> list[Sequence]:
        """The same for all beams of a search that are ready to compute; all or none of them."""
        ready = self._beams.ready_with(sequence)
        num_wanted = self._beams.num_blocks_to_write(ready)
        # For the last-ranked that runs, so that none takes from another.
        running = [one for one in self._beams.members_with(sequence) if one.row is not None]
        if not ready or not self._find_blocks(num_wanted, max(running, key=rank_of)):
            return []
        for beam in ready:
            must_copy = self._memory.must_copy_tail(beam)
            if must_copy or beam.num_computed_tokens >= beam.num_slots:
                self._write_on(beam, must_copy, step_id)
        return ready

    def _find_blocks(self, num_wanted: int, sequence: Sequence) -> bool:
        """Free blocks for a running sequence. Where there are none it pauses, if what steps in
        flight give back may be enough, or else is preempted: all others left outrank it."""
        if self._residents.reclaim(num_wanted, sequence, from_running=True):
            return True
        if self._memory.num_free_soon < num_wanted:
            self._residents.preempt(sequence, 0)
        return False

    def _write_on(self, sequence: Sequence, must_copy: bool, step_id: int) -> None:
        """Copy the shared last block, or grow; the blocks are free."""
        memory, draft = self._memory, self._draft
        if must_copy:
            edits, copies = memory.copy_tail(sequence, step_id)
            draft.table_edits += edits
            draft.copy(copies)
            return
        num_extra = 0
        pool = memory.pool
        if pool.num_free * 4 > pool.num_blocks and not sequence.forks and not sequence.is_beam:
            last = -(-(sequence.max_num_tokens - 1) // memory.block_size)
            num_left = last - sequence.num_slots // memory.block_size - 1
            most = pool.num_free // memory.num_groups - 1
            num_extra = max(0, min(self._num_lookahead_blocks, num_left, most))
        grown = memory.grow(sequence, sequence.num_computed_tokens + 1, num_extra)
        assert grown is not None, "blocks were found, but are not there"
        draft.table_edits += grown
        if num_extra:
            self._residents.note_reserve(sequence)
