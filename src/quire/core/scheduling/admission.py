"""Admits waiting sequences: in the policy's order, while rows, blocks and budget last.

CapacityCheck says whether a sequence fits, now and as all are predicted to grow. The scheduler
calls Admission once a step, before and after the running sequences were planned.
"""

from bisect import bisect_left
from dataclasses import dataclass
from enum import Enum

from quire.core.memory.kv_cache_manager import KVCacheManager
from quire.core.memory.prefix_index import PrefixMatch
from quire.core.scheduling.beams.scheduling import BeamScheduling
from quire.core.scheduling.output_length import OutputLengthPredictor, predicted_peak_blocks
from quire.core.scheduling.pacing import StepBudget
from quire.core.scheduling.plan_builder import PlanBuilder
from quire.core.scheduling.policy import Policy
from quire.core.scheduling.running_set import RunningSet, rank_of
from quire.core.scheduling.waiting import WaitingQueue
from quire.core.sequence import Sequence, SequenceState

LOOK_AGAIN_STEPS = 16
# From one start to the next, however much the first is predicted to use.
LONGEST_PAUSE_STEPS = 32


class Verdict(Enum):
    """Why a waiting sequence can't be admitted now."""

    NO_CAPACITY = "no_capacity"  # rows, blocks or a slot for its adapter are missing
    LOADS = "loads"  # what it needs is being brought from another tier, or its adapter read
    FOLLOWS = "follows"  # another computes what it needs just now; it would only do so twice


@dataclass(slots=True)
class _FailedCheck:
    """What a waiting sequence lacked when it was last checked.

    num_missing_blocks: that it needs to start. look_again_at: the step from which on its cached
        prefix is looked up anew. num_freed_at_forecast: how many blocks the pool had ever freed
        when it fitted then, but was predicted not to later.
    """

    num_missing_blocks: int = 0
    look_again_at: int = 0
    num_freed_at_forecast: int = -1


class CapacityCheck:
    """Whether rows and blocks are there for a waiting sequence, now and as all grow.

    Invariant: `_failed` has only sequences that have not ended.

    is_crowded: set once a check failed for want of blocks, until no sequence waits; new starts are
        then spaced out. Sequences that start together grow together and end together, so that
        memory is full for a moment, half empty on average, and the next start together again. A
        sequence that is predicted to use as many block-steps as the pool gives in k steps is
        followed k steps later: so many run that the pool is full on average.
    """

    def __init__(
        self,
        memory: KVCacheManager,
        running_set: RunningSet,
        lengths: OutputLengthPredictor,
        *,
        can_outrank: bool,
    ) -> None:
        """can_outrank: new sequences may take from running ones; see `Policy`."""
        self.lengths = lengths
        self.is_crowded = False
        self._started_at, self._pause = 0.0, 0.0
        self._memory = memory
        self._running_set = running_set
        self._can_outrank = can_outrank
        self._failed: dict[Sequence, _FailedCheck] = {}
        # What the running sequences hold and will need, as of `_expected_at`: (step, how many).
        self._step_id = 0
        self._expected_at = (-1, -1)
        self._expected_growth: list[tuple[int, int, int]] = []
        self._num_shared = 0

    def check(self, sequence: Sequence, step_id: int) -> PrefixMatch | Verdict:
        """What it could start from if a row and enough blocks are free, now and as predicted.

        Leaves each running sequence that outranks it room to grow once, or it is soon preempted.
        If it found too little last time, its cached prefix is looked up anew only now and then.
        """
        running_set, memory = self._running_set, self._memory
        self._step_id = step_id
        if not running_set.free_rows or not running_set.adapters.has_slot_for(sequence):
            return Verdict.NO_CAPACITY
        moves = memory.moves
        if moves is not None and moves.loads.awaits(sequence):
            return Verdict.LOADS
        num_outranking, is_idle = 0, running_set.is_idle
        if not is_idle:
            num_outranking = bisect_left(running_set.running, sequence.rank, key=rank_of)
        # One that may take from others what it lacks later has no need of a forecast.
        may_take = self._can_outrank or sequence.state is SequenceState.PREEMPTED
        is_sure = is_idle or (may_take and num_outranking < len(running_set.running))
        if self._must_pause(sequence, step_id) and not is_sure:
            return Verdict.NO_CAPACITY
        num_usable = memory.pool.num_free - num_outranking * memory.num_blocks_to_grow
        # Where no sequence computes, waiting would not free any block.
        failed = self._failed.get(sequence)
        if (
            failed is not None
            and not is_idle
            and step_id < failed.look_again_at
            and (
                num_usable < failed.num_missing_blocks
                or failed.num_freed_at_forecast == memory.pool.num_freed
            )
        ):
            return Verdict.NO_CAPACITY
        match = memory.match(sequence)
        if self.follows(sequence, match):
            return Verdict.FOLLOWS
        needed = memory.num_blocks_to_admit(sequence, match)
        if needed <= num_usable and (is_sure or self.fits_later(sequence, needed)):
            if not running_set.adapters.prepare(sequence):
                return Verdict.LOADS
            if moves is not None and moves.loads.begin(sequence, match, memory.now_s):
                self._failed.pop(sequence, None)  # what it lacked it needs no more
                return Verdict.LOADS
            self._note_start(sequence, needed, step_id)
            return match
        if failed is None:
            failed = self._failed[sequence] = _FailedCheck()
        if needed <= num_usable:
            # As long as all grow as predicted, nothing changes before something is given back.
            failed.num_freed_at_forecast = memory.pool.num_freed
        self.is_crowded = True
        failed.num_missing_blocks, failed.look_again_at = needed, step_id + LOOK_AGAIN_STEPS
        return Verdict.NO_CAPACITY

    def num_lacking(self, sequence: Sequence) -> int:
        """Free blocks that it needs, with room for those that outrank it to grow, and that were not
        there when it was last checked; 0 where it lacked none."""
        failed = self._failed.get(sequence)
        if failed is None:
            return 0
        num_outranking = bisect_left(self._running_set.running, sequence.rank, key=rank_of)
        return failed.num_missing_blocks + num_outranking * self._memory.num_blocks_to_grow

    def look_again(self, sequence: Sequence) -> None:
        """Blocks were taken for it: its next check looks up its cached prefix anew."""
        if sequence in self._failed:
            self._failed[sequence].look_again_at = 0

    def follows(self, sequence: Sequence, match: PrefixMatch) -> bool:
        """Whether a sequence of better rank computes the tokens that this would compute next."""
        parent, common = sequence.parent, sequence.num_common_tokens
        # Also for the last of them: in the step that computes it, a fork joins and shares all.
        num_shared = 0 if parent is None else parent.num_computed_tokens
        # A state that has gone on is of no use to a fork: it starts from what is cached.
        is_gone = num_shared > common and bool(self._memory.growth.states)
        if parent is not None and min(match.num_tokens + 1, num_shared) < common and not is_gone:
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
        memory, running = self._memory, self._running_set.running
        if not memory.num_blocks_to_grow or self._fit_all(sequence):
            return True
        if self._expected_at != (self._step_id, len(running)):
            self._expected_at = self._step_id, len(running)
            self._expected_growth = self._expect_growth(running)
            num_held = sum([memory.growth.num_held(other.block_tables) for other in running])
            self._num_shared = num_held - memory.pool.num_held
        size, growth = memory.block_size, memory.growth
        num_slots = -(-len(sequence.token_ids) // size) * size
        remaining = self._remaining(sequence)
        num_bounded = growth.bounded_blocks(sequence.num_tokens + remaining)
        entry = (num_new_blocks + num_bounded, num_slots - len(sequence.token_ids), remaining)
        entries = [*self._expected_growth, entry]
        peak = predicted_peak_blocks(entries, size, len(growth.unbounded))
        return peak - max(0, self._num_shared) <= memory.pool.num_blocks

    def _fit_all(self, sequence: Sequence) -> bool:
        """Whether there are blocks enough even if all grow to their limits. No forecast says
        more, and each takes much longer to make."""
        nums_tokens = [other.max_num_tokens for other in self._running_set.running]
        nums_tokens.append(sequence.max_num_tokens)
        num_blocks = self._memory.growth.all_most_blocks(nums_tokens)
        return num_blocks <= self._memory.pool.num_blocks

    def observe_end(self, sequence: Sequence) -> None:
        """Learn from a sequence that has ended, and forget it."""
        self._failed.pop(sequence, None)
        if sequence.shows_output_length:
            self.lengths.observe(sequence.num_output_tokens)

    def _must_pause(self, sequence: Sequence, step_id: int) -> bool:
        """Whether it would start too soon after the last start, while `is_crowded`."""
        is_paced = self.is_crowded and sequence.num_admissions == 0
        if not is_paced or step_id >= self._started_at + self._pause:
            return False
        num_blocks = self._memory.blocks_for(len(sequence.token_ids))
        return step_id < self._started_at + self._pause_of(sequence, num_blocks)

    def _note_start(self, sequence: Sequence, num_new_blocks: int, step_id: int) -> None:
        if sequence.num_admissions:
            return
        pause = self._pause_of(sequence, num_new_blocks)
        # Unused time of the step before counts: several sequences may start in one step.
        self._started_at = max(self._started_at + self._pause, step_id - 1)
        self._pause = pause

    def _pause_of(self, sequence: Sequence, num_new_blocks: int) -> float:
        """The steps in which the pool gives the block-steps that it is predicted to use."""
        memory = self._memory
        if not memory.num_blocks_to_grow:
            return 0.0
        num_steps = self._remaining(sequence)
        num_grown_blocks = num_steps / memory.block_size * len(memory.growth.unbounded)
        num_block_steps = num_steps * (num_new_blocks + num_grown_blocks / 2)
        return min(num_block_steps / memory.pool.num_blocks, LONGEST_PAUSE_STEPS)

    def _expect_growth(self, running: list[Sequence]) -> list[tuple[int, int, int]]:
        """See `predicted_peak_blocks`; of each in one go, since many may run."""
        size, growth = self._memory.block_size, self._memory.growth
        num_groups = len(growth.unbounded)
        counts: list[int] = []
        outputs: list[tuple[int, int]] = []
        for sequence in running:
            num_tokens = len(sequence.token_ids) + sequence.num_pending_tokens
            counts.append(num_tokens)
            num_prompt = sequence.num_prompt_tokens
            outputs.append((num_tokens - num_prompt, sequence.max_num_tokens - num_prompt))
        remaining = self.lengths.all_expected_remaining(outputs)
        expected: list[tuple[int, int, int]] = []
        for sequence, count, to_come in zip(running, counts, remaining, strict=True):
            num_slots = sequence.num_slots
            if growth.bounded:  # what windows and states will hold, and full groups beside them
                num_slots = max(num_slots, -(-count // size) * size)
            num_held = num_groups * (num_slots // size) + growth.bounded_blocks(count + to_come)
            expected.append((num_held, max(0, num_slots - count), to_come))
        return expected

    def _remaining(self, sequence: Sequence) -> int:
        num_prompt = sequence.num_prompt_tokens
        limit = sequence.max_num_tokens - num_prompt
        return self.lengths.expected_remaining(sequence.num_tokens - num_prompt, limit)


# A waiting sequence that does not fit is overtaken by at most so many others.
MAX_OVERTAKEN = 32
# So many that do not fit are passed over in one step.
MAX_PASSED_OVER = 4


@dataclass(slots=True)
class AdmissionStats:
    """queue_s: waiting before first admission, summed."""

    num_admissions: int = 0
    queue_s: float = 0.0


class Admission:
    """Moves sequences from the waiting queue to the running set.

    Nothing is admitted in a step that preempted (the scheduler sees to that), a preempted sequence
    is overtaken only while what it lost is loaded, and a new one at most MAX_OVERTAKEN times.
    """

    def __init__(
        self,
        policy: Policy,
        waiting: WaitingQueue,
        running_set: RunningSet,
        memory: KVCacheManager,
        beams: BeamScheduling,
        builder: PlanBuilder,
        lengths: OutputLengthPredictor,
    ) -> None:
        can_outrank = policy.can_outrank
        self.capacity = CapacityCheck(memory, running_set, lengths, can_outrank=can_outrank)
        self.stats = AdmissionStats()
        self._policy = policy
        self._waiting = waiting
        self._running_set = running_set
        self._memory = memory
        self._beams = beams
        self._builder = builder

    def make_room_for_first(self) -> None:
        """If the first waiting sequence outranks others, take from them what it needs.

        A new one takes from running ones only if the policy lets it, or if none runs.
        """
        head = next(
            (sequence for sequence in self._waiting.candidates() if not self._is_early(sequence)),
            None,
        )
        if head is None:
            return
        running_set, memory = self._running_set, self._memory
        is_idle = running_set.is_idle
        may_take = self._policy.can_outrank or head.state is SequenceState.PREEMPTED
        outranked = bool(running_set.running) and head.rank < running_set.running[-1].rank
        if not is_idle and not (may_take and outranked):
            return
        running_set.free_adapter_slot(head, from_all=is_idle)
        match = memory.match(head)
        if self.capacity.follows(head, match):
            return
        num_spare = 0
        if not is_idle:
            num_outranking = bisect_left(running_set.running, head.rank, key=rank_of)
            num_spare = num_outranking * memory.num_blocks_to_grow
            needed = memory.num_blocks_to_admit(head, match) + num_spare
            if not self._could_take(needed, head):
                return
        self.clear_way(head, num_spare, from_all=is_idle)
        if not running_set.free_rows:
            running_set.preempt(running_set.running[-1], 0)

    def clear_way(self, sequence: Sequence, num_spare: int = 0, *, from_all: bool = False) -> None:
        """Take from others what a waiting sequence needs, and num_spare blocks for others yet.

        What is taken may be what it would have shared: so look again until there is enough.
        """
        memory = self._memory
        self.capacity.look_again(sequence)
        num_free_before = -1
        while num_free_before < memory.num_free_soon:
            num_free_before = memory.num_free_soon
            needed = memory.num_blocks_to_admit(sequence, memory.match(sequence)) + num_spare
            if needed <= num_free_before:
                return
            self._running_set.reclaim(needed, sequence, from_running=True, from_all=from_all)

    def _could_take(self, num_wanted: int, head: Sequence) -> bool:
        """Whether num_wanted blocks would be free if all that it outranks gave up all theirs."""
        running_set, rank = self._running_set, head.rank
        outranked = [
            *running_set.running[bisect_left(running_set.running, rank, key=rank_of) :],
            *running_set.preempted[bisect_left(running_set.preempted, rank, key=rank_of) :],
        ]
        num_held = self._memory.growth.num_held
        num_theirs = sum(num_held(sequence.block_tables) for sequence in outranked)
        moves = self._memory.moves
        if moves is not None:
            num_theirs += moves.loads.num_held(running_set.loading(head, rank))
        return num_wanted <= self._memory.num_free_soon + num_theirs

    def admit_waiting(
        self, chunks: dict[Sequence, int], budget: StepBudget, step_id: int, now_s: float
    ) -> None:
        """Admit in the order of the policy while rows, blocks and budget last.

        Those that do not fit are passed over, within bounds; a preempted one never is.
        """
        passed_over: list[Sequence] = []
        drawn: set[Sequence] = set()
        for sequence in self._waiting.candidates():
            if budget.is_spent or not self._running_set.free_rows:
                break
            drawn.add(sequence)
            if self._is_early(sequence):
                continue
            if sequence.is_in_one_step and sequence.num_tokens > budget.num_tokens:
                break  # it is first in the next step
            found = self.capacity.check(sequence, step_id)
            if isinstance(found, PrefixMatch):
                self.admit(sequence, found, step_id, now_s)
                chunks[sequence] = self.serve(sequence, budget)
                for overtaken in passed_over:
                    overtaken.num_overtaken += 1
                if any(overtaken.num_overtaken >= MAX_OVERTAKEN for overtaken in passed_over):
                    break
            elif found is Verdict.NO_CAPACITY:
                passed_over.append(sequence)
                if (
                    sequence.state is SequenceState.PREEMPTED
                    or sequence.num_overtaken >= MAX_OVERTAKEN
                    or len(passed_over) >= MAX_PASSED_OVER
                ):
                    self._take_loaded(passed_over, drawn)
                    break
        if not len(self._waiting):
            self.capacity.is_crowded = False

    def _take_loaded(self, passed_over: list[Sequence], drawn: set[Sequence]) -> None:
        """Nothing behind those that were passed over is admitted before one of them. So what was
        loaded for sequences behind them, which are not drawn, is given up for the first that it is
        enough for: else it would be held until running ones end, and keep all that wait."""
        moves, memory = self._memory.moves, self._memory
        if moves is None:
            return
        behind = [other for other in moves.loads.sequences if other not in drawn]
        if not behind:
            return
        num_free, num_held = memory.num_free_soon, moves.loads.num_held(behind)
        for sequence in passed_over:
            num_wanted = self.capacity.num_lacking(sequence)
            if num_free < num_wanted <= num_free + num_held:
                for other in sorted(behind, key=rank_of, reverse=True):
                    if memory.num_free_soon < num_wanted:
                        moves.loads.give_up(other)
                return

    def admit(self, sequence: Sequence, match: PrefixMatch, step_id: int, now_s: float) -> None:
        """Waiting -> RUNNING: a row and tables for all tokens known so far."""
        self._waiting.remove(sequence)
        parent = sequence.parent
        sequence.leave_parent()
        if parent is not None and not parent.needs_prompt_logprobs:
            sequence.prompt_logprobs = list(parent.prompt_logprobs)
        is_first = sequence.num_admissions == 0
        self._builder.copy(self._memory.admit(sequence, match, step_id))
        if is_first:
            self.count_first(sequence, now_s)
        self.stats.num_admissions += 1
        self._running_set.enter(sequence)
        self._builder.admit(sequence)

    def count_first(self, sequence: Sequence, now_s: float) -> None:
        """Its first admission: how long it waited, and the rank that it keeps from now on."""
        self.stats.queue_s += now_s - sequence.arrival_s
        sequence.first_scheduled_s = now_s
        rank = self._policy.rank_admitted(sequence)
        if rank is not None:
            sequence.rank = (*rank, sequence.order)

    def fits_later(self, sequence: Sequence, num_new_blocks: int) -> bool:
        """See `CapacityCheck`; for forks that get a row without waiting for their turn."""
        return self.capacity.fits_later(sequence, num_new_blocks)

    def observe_end(self, sequence: Sequence) -> None:
        """A sequence has ended; its length is evidence for those of others."""
        self.capacity.observe_end(sequence)
        if not len(self._waiting):  # it may have been the last that waited
            self.capacity.is_crowded = False

    def _is_early(self, sequence: Sequence) -> bool:
        """Whether it can't go on yet, however many blocks are free."""
        moves = self._memory.moves
        if self._running_set.adapters.awaits(sequence):
            return True
        if moves is not None and moves.loads.awaits(sequence):
            return True
        return sequence.num_pending_tokens > 0 or self._beams.has_reported(sequence)

    def serve(self, sequence: Sequence, budget: StepBudget) -> int:
        """The chunk of a sequence that doesn't decode, taken from the budget and counted."""
        computed = sequence.num_computed_tokens
        chunk = self.chunk(sequence, budget)
        if self._policy.counts_service:
            first = max(computed, sequence.num_served_tokens)
            sequence.num_served_tokens = max(first, computed + chunk)
            num_new = min(computed + chunk, sequence.num_prompt_tokens) - first
            if num_new > 0:
                self._policy.on_service(sequence, num_new, 0)
        return chunk

    def chunk(self, sequence: Sequence, budget: StepBudget) -> int:
        """What it computes next: as far as the budget goes, and to where its state is to be kept.

        There is a slot for one token at least. Windows' tables grow by what is free, with a spare
        block for each running sequence.
        """
        memory, computed = self._memory, sequence.num_computed_tokens
        num_wanted = memory.snapshots.tokens_to_stop(sequence, sequence.num_tokens - computed)
        num_slots = sequence.num_slots
        if computed + num_wanted > num_slots:
            num_spare = len(self._running_set.running) * memory.num_blocks_to_grow
            num_blocks = max(0, memory.pool.num_free - num_spare) // len(memory.growth.growing)
            num_wanted = min(num_wanted, num_slots + num_blocks * memory.block_size - computed)
        wants_logprobs = sequence.needs_prompt_logprobs
        chunk = budget.take(computed, num_wanted, wants_logprobs=wants_logprobs)
        if computed + chunk > num_slots:
            grown = memory.grow(sequence, computed + chunk)
            assert grown is not None, "free blocks were counted, but are not there"
            self._builder.edit_tables(grown)
        return chunk
