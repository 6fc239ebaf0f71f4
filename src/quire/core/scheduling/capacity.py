"""Whether a waiting sequence finds room: now, and as far as can be foretold.

Changes nothing but what it remembers of its own looks. Used by `admission` alone.
"""

from bisect import bisect_left
from enum import Enum

from quire.core.memory.kv_cache_manager import KVCacheManager
from quire.core.memory.prefix_index import PrefixMatch
from quire.core.request import FinishReason
from quire.core.scheduling.output_length import OutputLengthPredictor, predicted_peak_blocks
from quire.core.scheduling.running_set import Residents, rank_of
from quire.core.sequence import Sequence, SequenceState

LOOK_AGAIN_STEPS = 16
# From one start to the next, however much the first is foretold to use.
LONGEST_PAUSE_STEPS = 32


class Verdict(Enum):
    """What became of a look for room, where there was none."""

    NO_ROOM = "no_room"  # rows or blocks are missing
    FOLLOWS = "follows"  # another computes what it needs just now; it would only do so twice


class RoomFinder:
    """Looks for rows and blocks for those that wait.

    is_crowded: since somebody found too few blocks, somebody has been waiting. Meanwhile new ones
        start apart. Those that start together grow together and end together, so that memory is
        full for a moment, half empty on average, and the next start together again. One that is
        foretold to use as many block-steps as the pool gives in k steps is followed k steps later:
        so many run that the pool is full on average.
    """

    def __init__(self, memory: KVCacheManager, residents: Residents, *, can_outrank: bool) -> None:
        """can_outrank: new sequences may take from running ones; see `Policy`."""
        self.lengths = OutputLengthPredictor()
        self.is_crowded = False
        self._started_at, self._pause = 0.0, 0.0
        self._memory = memory
        self._residents = residents
        self._can_outrank = can_outrank
        # What the running ones hold and will need, of one step and so many of them.
        self._step_id = 0
        self._forecast_of = (-1, -1)
        self._growths: list[tuple[int, int, int]] = []

    def find(self, sequence: Sequence, step_id: int) -> PrefixMatch | Verdict:
        """What it could start from if a row and enough blocks are free, now and as predicted.

        Leaves each running sequence that outranks it room to grow once, or it is soon preempted.
        If it found too little last time, its cached prefix is looked up anew only now and then.
        """
        residents, memory = self._residents, self._memory
        self._step_id = step_id
        if not residents.free_rows:
            return Verdict.NO_ROOM
        num_outranking, is_idle = 0, residents.is_idle
        if not is_idle:
            num_outranking = bisect_left(residents.running, sequence.rank, key=rank_of)
        # One that may take from others what it lacks later has no need of a forecast.
        may_take = self._can_outrank or sequence.state is SequenceState.PREEMPTED
        is_sure = is_idle or (may_take and num_outranking < len(residents.running))
        if self._must_pause(sequence, step_id) and not is_sure:
            return Verdict.NO_ROOM
        num_usable = memory.pool.num_free - num_outranking * memory.num_blocks_to_grow
        # Where nobody computes, nothing will be given back for which it could wait.
        if (
            not is_idle
            and step_id < sequence.look_again_at
            and (
                num_usable < sequence.num_missing_blocks
                or sequence.num_freed_at_forecast == memory.pool.num_freed
            )
        ):
            return Verdict.NO_ROOM
        match = memory.match(sequence)
        if self.follows(sequence, match):
            return Verdict.FOLLOWS
        needed = memory.num_blocks_to_admit(sequence, match)
        if needed <= num_usable:
            if is_sure or self.fits_later(sequence, needed):
                self._note_start(sequence, needed, step_id)
                return match
            # As long as all grow as foretold, nothing changes before something is given back.
            sequence.num_freed_at_forecast = memory.pool.num_freed
        self.is_crowded = True
        sequence.num_missing_blocks, sequence.look_again_at = needed, step_id + LOOK_AGAIN_STEPS
        return Verdict.NO_ROOM

    def follows(self, sequence: Sequence, match: PrefixMatch) -> bool:
        """Whether somebody who outranks it computes tokens that it would compute next."""
        parent, common = sequence.parent, sequence.num_common_tokens
        # Also for the last of them: in the step that computes it, a fork joins and shares all.
        if parent is not None and min(match.num_tokens + 1, parent.num_computed_tokens) < common:
            return not parent.is_finished and parent.rank < sequence.rank
        leader = match.leader
        return (
            leader is not None
            and leader.state is SequenceState.RUNNING
            and leader.rank < sequence.rank
        )

    def fits_later(self, sequence: Sequence, num_new_blocks: int) -> bool:
        """Whether all that run, and this one with so many blocks more, will fit as they grow.

        What several hold is counted for each of them by the prediction, and taken off again here.
        """
        memory, running = self._memory, self._residents.running
        if not memory.num_blocks_to_grow or self._fit_all(sequence):
            return True
        if self._forecast_of != (self._step_id, len(running)):
            self._forecast_of = self._step_id, len(running)
            self._growths = self._growths_of(running)
        num_shared = sum([entry[0] for entry in self._growths]) - memory.pool.num_held
        size = memory.block_size
        num_slots = -(-len(sequence.token_ids) // size) * size
        entry = (num_new_blocks, num_slots - len(sequence.token_ids), self._remaining(sequence))
        peak = predicted_peak_blocks([*self._growths, entry], size, memory.num_groups)
        return peak - max(0, num_shared) <= memory.pool.num_blocks

    def _fit_all(self, sequence: Sequence) -> bool:
        """Whether there are blocks enough even if all grow to their limits. No forecast says
        more, and each takes much longer to make."""
        memory = self._memory
        size = memory.block_size
        num_blocks = sum([-(-one.max_num_tokens // size) for one in self._residents.running])
        num_blocks += -(-sequence.max_num_tokens // size)
        return num_blocks * memory.num_groups <= memory.pool.num_blocks

    def observe_end(self, sequence: Sequence) -> None:
        """Learn from a sequence that has ended."""
        ended = sequence.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
        if ended and not sequence.is_beam:
            self.lengths.observe(sequence.num_output_tokens)

    def _must_pause(self, sequence: Sequence, step_id: int) -> bool:
        """Whether it would start too soon after the last one, while it is crowded."""
        is_paced = self.is_crowded and sequence.num_admissions == 0
        if not is_paced or step_id >= self._started_at + self._pause:
            return False
        num_blocks = self._memory.blocks_for(len(sequence.token_ids))
        return step_id < self._started_at + self._pause_of(sequence, num_blocks)

    def _note_start(self, sequence: Sequence, num_new_blocks: int, step_id: int) -> None:
        if sequence.num_admissions:
            return
        pause = self._pause_of(sequence, num_new_blocks)
        # What is left of the step before is not lost: several may start in one.
        self._started_at = max(self._started_at + self._pause, step_id - 1)
        self._pause = pause

    def _pause_of(self, sequence: Sequence, num_new_blocks: int) -> float:
        """The steps in which the pool gives the block-steps that it is foretold to use."""
        memory = self._memory
        if not memory.num_blocks_to_grow:
            return 0.0
        num_steps = self._remaining(sequence)
        num_grown_blocks = num_steps / memory.block_size * memory.num_groups
        num_block_steps = num_steps * (num_new_blocks + num_grown_blocks / 2)
        return min(num_block_steps / memory.pool.num_blocks, LONGEST_PAUSE_STEPS)

    def _growths_of(self, running: list[Sequence]) -> list[tuple[int, int, int]]:
        """See `predicted_peak_blocks`; of each in one go, since many may run."""
        size, num_groups = self._memory.block_size, self._memory.num_groups
        counts: list[int] = []
        outputs: list[tuple[int, int]] = []
        for one in running:
            num_tokens = len(one.token_ids) + one.num_pending_tokens
            counts.append(num_tokens)
            num_prompt = one.num_prompt_tokens
            outputs.append((num_tokens - num_prompt, one.max_num_tokens - num_prompt))
        remaining = self.lengths.all_expected_remaining(outputs)
        return [
            (num_groups * (one.num_slots // size), max(0, one.num_slots - count), to_come)
            for one, count, to_come in zip(running, counts, remaining, strict=True)
        ]

    def _remaining(self, sequence: Sequence) -> int:
        num_prompt = sequence.num_prompt_tokens
        limit = sequence.max_num_tokens - num_prompt
        return self.lengths.expected_remaining(sequence.num_tokens - num_prompt, limit)
