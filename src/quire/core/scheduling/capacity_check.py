"""Checks whether there are rows and blocks for a waiting sequence, now and later.

Used by `admission`.
"""

from bisect import bisect_left
from dataclasses import dataclass
from enum import Enum

from quire.core.memory.kv_cache_manager import KVCacheManager
from quire.core.memory.prefix_index import PrefixMatch
from quire.core.scheduling.growth_forecast import GrowthForecast
from quire.core.scheduling.output_length import OutputLengthPredictor
from quire.core.scheduling.running_set import RunningSet, rank_of
from quire.core.sequence import Sequence, SequenceState

# A sequence that did not fit looks up its cached prefix again after this many steps.
RECHECK_STEPS = 16
# Maximum number of steps between the starts of two sequences, however much memory the first is
# predicted to use.
LONGEST_PAUSE_STEPS = 32


class Verdict(Enum):
    """Why a waiting sequence can't be admitted now."""

    NO_CAPACITY = "no_capacity"  # rows, blocks or a slot for its adapter or content are missing
    LOADS = "loads"  # its blocks are loaded from another tier, or its adapter or content is read
    FOLLOWS = "follows"  # another sequence is computing its next tokens, which it can then share


@dataclass(slots=True)
class _FailedCheck:
    """The reason why a waiting sequence failed its last check."""

    #: Number of free blocks that the sequence needs to start.
    num_missing_blocks: int = 0
    #: Id of the first step that looks up its cached prefix again.
    recheck_at: int = 0
    #: The pool's count of freed blocks when the sequence fitted, but was predicted not to fit
    #: later; -1 if it did not fit.
    num_freed_at_forecast: int = -1


class CapacityCheck:
    """Decides whether a waiting sequence has a row and enough blocks, now and as all sequences
    grow.

    Invariant: `_failed` holds only sequences that have not ended.

    While memory is crowded, new starts are spaced out. Sequences that start together grow and end
    together: memory is then full for a moment and half empty on average, and the next sequences
    start together again. A block held for one step is a block-step. If a sequence is predicted to
    use as many block-steps as the pool has in k steps, the next sequence starts k steps later,
    which fills the pool on average.
    """

    def __init__(
        self,
        memory: KVCacheManager,
        running_set: RunningSet,
        lengths: OutputLengthPredictor,
        *,
        can_outrank: bool,
    ) -> None:
        """can_outrank: whether new sequences may take blocks from running ones; see `Policy`."""
        self.forecast = GrowthForecast(memory, running_set, lengths)
        #: Whether a check failed for lack of blocks since the waiting queue was last empty.
        self.is_crowded = False
        self._started_at, self._pause = 0.0, 0.0
        self._memory = memory
        self._running_set = running_set
        self._can_outrank = can_outrank
        self._failed: dict[Sequence, _FailedCheck] = {}

    def check(self, sequence: Sequence, step_id: int) -> PrefixMatch | Verdict:
        """The cached prefix to start from if the sequence fits now and later; otherwise the reason
        why it does not fit.

        Leaves room for each higher-ranked running sequence to grow once; otherwise this sequence
        would soon be preempted. After a failed check, its cached prefix is looked up again only
        every RECHECK_STEPS steps.
        """
        running_set, memory = self._running_set, self._memory
        self.forecast.step_id = step_id
        # First, the cheap reasons: no row, no adapter slot, or a load under way.
        if not running_set.free_rows or not running_set.adapters.has_slot_for(sequence.adapter):
            return Verdict.NO_CAPACITY
        moves = memory.moves
        if moves is not None and moves.loads.awaits(sequence):
            return Verdict.LOADS
        num_outranking, is_idle = 0, running_set.is_idle
        if not is_idle:
            num_outranking = bisect_left(running_set.running, sequence.rank, key=rank_of)
        # A sequence that may later take blocks from others needs no forecast.
        may_take = self._can_outrank or sequence.state is SequenceState.PREEMPTED
        is_sure = is_idle or (may_take and num_outranking < len(running_set.running))
        if self._must_pause(sequence, step_id) and not is_sure:
            return Verdict.NO_CAPACITY
        num_usable = memory.pool.num_free - num_outranking * memory.num_blocks_to_grow
        # Repeat a failed check only if its reason may be gone, or if no sequence computes, because
        # then waiting would not free any block.
        failed = self._failed.get(sequence)
        if (
            failed is not None
            and not is_idle
            and step_id < failed.recheck_at
            and (
                num_usable < failed.num_missing_blocks
                or failed.num_freed_at_forecast == memory.pool.num_freed
            )
        ):
            return Verdict.NO_CAPACITY
        # Then look up its prefix and count the blocks that it lacks.
        match = memory.match(sequence)
        if self.follows(sequence, match):
            return Verdict.FOLLOWS
        needed = memory.num_blocks_to_admit(sequence, match)
        if needed <= num_usable and (is_sure or self.forecast.fits_later(sequence, needed)):
            if not running_set.adapters.prepare(sequence.adapter):
                return Verdict.LOADS
            if moves is not None and moves.loads.begin(sequence, match, memory.now_s):
                self._failed.pop(sequence, None)  # the load took the blocks that it lacked
                return Verdict.LOADS
            contents, first = running_set.content_loads, match.num_tokens
            if not contents.has_slot_at(sequence, first):
                return Verdict.NO_CAPACITY
            if not contents.prepare(sequence, first, 1):
                return Verdict.LOADS
            self._note_start(sequence, needed, step_id)
            return match
        if failed is None:
            failed = self._failed[sequence] = _FailedCheck()
        if needed <= num_usable:
            # As long as all sequences grow as predicted, the forecast changes only when a block is
            # freed.
            failed.num_freed_at_forecast = memory.pool.num_freed
        self.is_crowded = True
        failed.num_missing_blocks, failed.recheck_at = needed, step_id + RECHECK_STEPS
        return Verdict.NO_CAPACITY

    def num_lacking(self, sequence: Sequence) -> int:
        """Number of free blocks that the sequence needed at its last, failed check; 0 without a
        failed check.

        Includes room to grow for the running sequences that outrank it.
        """
        failed = self._failed.get(sequence)
        if failed is None:
            return 0
        num_outranking = bisect_left(self._running_set.running, sequence.rank, key=rank_of)
        return failed.num_missing_blocks + num_outranking * self._memory.num_blocks_to_grow

    def recheck_prefix(self, sequence: Sequence) -> None:
        """Let the next check look up its cached prefix again, because blocks were taken for it."""
        if sequence in self._failed:
            self._failed[sequence].recheck_at = 0

    def follows(self, sequence: Sequence, match: PrefixMatch) -> bool:
        """Whether a higher-ranked sequence is computing the tokens that this sequence would compute
        next."""
        parent, common = sequence.parent, sequence.num_common_tokens
        # Wait even for the last common token: in the step that computes it, the fork joins and
        # shares all blocks.
        num_shared = 0 if parent is None else parent.num_computed_tokens
        # A parent's state that is past the common tokens is useless: the fork uses the cache.
        is_gone = num_shared > common and bool(self._memory.growth.states)
        if parent is not None and min(match.num_tokens + 1, num_shared) < common and not is_gone:
            return not parent.is_finished and parent.rank < sequence.rank
        leader = match.leader
        return (
            leader is not None
            and leader.state is SequenceState.RUNNING
            and leader.rank < sequence.rank
        )

    def observe_end(self, sequence: Sequence) -> None:
        """Learn the output length of a sequence that has ended, and forget its failed check."""
        self._failed.pop(sequence, None)
        if sequence.shows_output_length:
            self.forecast.lengths.observe(sequence.num_output_tokens)

    def _must_pause(self, sequence: Sequence, step_id: int) -> bool:
        """Whether the sequence would start too soon after the last start, while memory is
        crowded."""
        is_paced = self.is_crowded and sequence.num_admissions == 0
        if not is_paced or step_id >= self._started_at + self._pause:
            return False
        num_blocks = self._memory.blocks_for(len(sequence.token_ids))
        return step_id < self._started_at + self._pause_of(sequence, num_blocks)

    def _note_start(self, sequence: Sequence, num_new_blocks: int, step_id: int) -> None:
        if sequence.num_admissions:
            return
        pause = self._pause_of(sequence, num_new_blocks)
        # A pause begins when the previous pause ended, or one step ago if that is later, so that
        # several sequences with short pauses may start in one step.
        self._started_at = max(self._started_at + self._pause, step_id - 1)
        self._pause = pause

    def _pause_of(self, sequence: Sequence, num_new_blocks: int) -> float:
        """Number of steps in which the pool has as many block-steps as the sequence is predicted to
        use."""
        memory = self._memory
        if not memory.num_blocks_to_grow:
            return 0.0
        num_steps = self.forecast.num_remaining(sequence)
        num_grown_blocks = num_steps / memory.block_size * len(memory.growth.unbounded)
        num_block_steps = num_steps * (num_new_blocks + num_grown_blocks / 2)
        return min(num_block_steps / memory.pool.num_blocks, LONGEST_PAUSE_STEPS)
