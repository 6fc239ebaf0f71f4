"""Admits sequences of the waiting queue in the policy's order, while rows, blocks and budget last.

CapacityCheck says whether a sequence fits now, and later when all sequences have grown as
predicted. The scheduler calls Admission twice a step: before and after it plans the running
sequences.
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

# Steps after which a sequence that did not fit looks up its cached prefix again.
RECHECK_STEPS = 16
# Most steps between two starts, however much the first is predicted to use.
LONGEST_PAUSE_STEPS = 32


class Verdict(Enum):
    """Why a waiting sequence can't be admitted now."""

    NO_CAPACITY = "no_capacity"  # rows, blocks or a slot for its adapter are missing
    LOADS = "loads"  # its blocks are being loaded from another tier, or its adapter is being read
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
    """Whether there are rows and blocks for a waiting sequence, now and as all sequences grow.

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
        self.lengths = lengths
        #: Whether a check failed for lack of blocks since the waiting queue was last empty.
        self.is_crowded = False
        self._started_at, self._pause = 0.0, 0.0
        self._memory = memory
        self._running_set = running_set
        self._can_outrank = can_outrank
        self._failed: dict[Sequence, _FailedCheck] = {}
        # The blocks that running sequences hold and will need, as of `_expected_at`, which is
        # (step, number of running sequences).
        self._step_id = 0
        self._expected_at = (-1, -1)
        self._expected_growth: list[tuple[int, int, int]] = []
        self._num_shared = 0

    def check(self, sequence: Sequence, step_id: int) -> PrefixMatch | Verdict:
        """The prefix that the sequence could start from, if it fits now and later; else why not.

        Leaves room for each higher-ranked running sequence to grow once; otherwise this sequence
        would soon be preempted. After a failed check, its cached prefix is looked up again only now
        and then.
        """
        running_set, memory = self._running_set, self._memory
        self._step_id = step_id
        # First, the cheap reasons: no row, no adapter slot, or a load under way.
        if not running_set.free_rows or not running_set.adapters.has_slot_for(sequence):
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
        # Repeat a failed check only if its reason may be gone. While no sequence computes, waiting
        # would not free any block.
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
        if needed <= num_usable and (is_sure or self.fits_later(sequence, needed)):
            if not running_set.adapters.prepare(sequence):
                return Verdict.LOADS
            if moves is not None and moves.loads.begin(sequence, match, memory.now_s):
                self._failed.pop(sequence, None)  # the load took the blocks that it lacked
                return Verdict.LOADS
            self._note_start(sequence, needed, step_id)
            return match
        if failed is None:
            failed = self._failed[sequence] = _FailedCheck()
        if needed <= num_usable:
            # While all grow as predicted, the forecast stays the same until a block is freed.
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

    def fits_later(self, sequence: Sequence, num_new_blocks: int) -> bool:
        """Whether this sequence, with num_new_blocks more, will fit beside the running sequences as
        all grow.

        The prediction counts shared blocks once for each holder; this subtracts them again.
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
        """Whether there are enough blocks even if all sequences grow to their limits.

        Then the forecast, which takes much longer, can't say no.
        """
        nums_tokens = [other.max_num_tokens for other in self._running_set.running]
        nums_tokens.append(sequence.max_num_tokens)
        num_blocks = self._memory.growth.all_most_blocks(nums_tokens)
        return num_blocks <= self._memory.pool.num_blocks

    def observe_end(self, sequence: Sequence) -> None:
        """Learn the output length of a sequence that has ended, and forget its failed check."""
        self._failed.pop(sequence, None)
        if sequence.shows_output_length:
            self.lengths.observe(sequence.num_output_tokens)

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
        # The pause counts from when the last one ended, but at most one step back, so that several
        # sequences with short pauses may start in one step.
        self._started_at = max(self._started_at + self._pause, step_id - 1)
        self._pause = pause

    def _pause_of(self, sequence: Sequence, num_new_blocks: int) -> float:
        """Number of steps in which the pool has as many block-steps as the sequence is predicted to
        use."""
        memory = self._memory
        if not memory.num_blocks_to_grow:
            return 0.0
        num_steps = self._remaining(sequence)
        num_grown_blocks = num_steps / memory.block_size * len(memory.growth.unbounded)
        num_block_steps = num_steps * (num_new_blocks + num_grown_blocks / 2)
        return min(num_block_steps / memory.pool.num_blocks, LONGEST_PAUSE_STEPS)

    def _expect_growth(self, running: list[Sequence]) -> list[tuple[int, int, int]]:
        """Blocks held, free slots and tokens to come of each sequence; see `predicted_peak_blocks`.

        Computed for all sequences together, since many may run.
        """
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
            if growth.bounded:  # count full groups by tokens; windows and states have a bound
                num_slots = max(num_slots, -(-count // size) * size)
            num_held = num_groups * (num_slots // size) + growth.bounded_blocks(count + to_come)
            expected.append((num_held, max(0, num_slots - count), to_come))
        return expected

    def _remaining(self, sequence: Sequence) -> int:
        num_prompt = sequence.num_prompt_tokens
        limit = sequence.max_num_tokens - num_prompt
        return self.lengths.expected_remaining(sequence.num_tokens - num_prompt, limit)


# Most sequences that may overtake a waiting one that does not fit.
MAX_OVERTAKEN = 32
# Most sequences that do not fit and are passed over in one step.
MAX_PASSED_OVER = 4


@dataclass(slots=True)
class AdmissionStats:
    """Counts of admissions since the start."""

    num_admissions: int = 0
    #: Sum of the waiting times before first admissions, in seconds.
    queue_s: float = 0.0


class Admission:
    """Moves sequences from the waiting queue to the running set.

    Invariant: a preempted sequence is overtaken only while its lost blocks are loaded, and a new
    sequence at most MAX_OVERTAKEN times. The scheduler admits nothing in a step that preempted.
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
        """If the first waiting sequence outranks others, take the blocks that it needs from them.

        A new sequence takes blocks from running sequences only if the policy allows that, or if no
        running sequence can compute.
        """
        # First, find the sequence, and whether it may take from running ones.
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
        # Then take blocks and a row, unless even all the blocks that it may take are too few.
        num_spare = 0
        if not is_idle:
            num_outranking = bisect_left(running_set.running, head.rank, key=rank_of)
            num_spare = num_outranking * memory.num_blocks_to_grow
            needed = memory.num_blocks_to_admit(head, match) + num_spare
            if not self._could_take(needed, head):
                return
        self.reclaim_for(head, num_spare, from_all=is_idle)
        if not running_set.free_rows:
            running_set.preempt(running_set.running[-1], 0)

    def reclaim_for(
        self, sequence: Sequence, num_spare: int = 0, *, from_all: bool = False
    ) -> None:
        """Take the blocks that a waiting sequence needs from others, and num_spare more for their
        growth.

        A block that is taken may be one that the sequence would have shared, so its need is
        computed again until there are enough blocks.
        """
        memory = self._memory
        self.capacity.recheck_prefix(sequence)
        num_free_before = -1
        while num_free_before < memory.num_free_soon:
            num_free_before = memory.num_free_soon
            needed = memory.num_blocks_to_admit(sequence, memory.match(sequence)) + num_spare
            if needed <= num_free_before:
                return
            self._running_set.reclaim(needed, sequence, from_running=True, from_all=from_all)

    def _could_take(self, num_wanted: int, head: Sequence) -> bool:
        """Whether num_wanted blocks would be free if all sequences that `head` outranks gave up
        their blocks."""
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
        """Admit in the policy's order while rows, blocks and budget last.

        New sequences that do not fit are passed over, within bounds; preempted sequences never are.
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
                break  # it needs more budget, which it gets as the first of the next step
            found = self.capacity.check(sequence, step_id)
            if isinstance(found, PrefixMatch):
                self.admit(sequence, found, step_id, now_s)
                chunks[sequence] = self.serve(sequence, budget)
                for overtaken in passed_over:
                    overtaken.num_overtaken += 1
                if any(overtaken.num_overtaken >= MAX_OVERTAKEN for overtaken in passed_over):
                    break
            # LOADS and FOLLOWS do not count as passed over: the wait ends by itself.
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
        """Give blocks of loads to the first passed-over sequence for which they suffice.

        Later sequences are not admitted ahead of the ones passed over. So the blocks loaded for
        later sequences, which were not drawn, would be held until running sequences end, and could
        stop all waiting sequences.
        """
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
                        moves.loads.abandon(other)
                return

    def admit(self, sequence: Sequence, match: PrefixMatch, step_id: int, now_s: float) -> None:
        """Move a waiting sequence to RUNNING, with a row and tables for all tokens known so far."""
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
        self._running_set.assign_row(sequence)
        self._builder.admit(sequence)

    def count_first(self, sequence: Sequence, now_s: float) -> None:
        """Count a sequence's first admission, and set its final rank."""
        self.stats.queue_s += now_s - sequence.arrival_s
        sequence.first_scheduled_s = now_s
        rank = self._policy.rank_admitted(sequence)
        if rank is not None:
            sequence.rank = (*rank, sequence.order)

    def fits_later(self, sequence: Sequence, num_new_blocks: int) -> bool:
        """See `CapacityCheck.fits_later`; used for forks that get a row without waiting in the
        queue."""
        return self.capacity.fits_later(sequence, num_new_blocks)

    def observe_end(self, sequence: Sequence) -> None:
        """Learn from a sequence that has ended."""
        self.capacity.observe_end(sequence)
        if not len(self._waiting):  # the sequence may have been the last waiting one
            self.capacity.is_crowded = False

    def _is_early(self, sequence: Sequence) -> bool:
        """Whether the sequence can't continue yet, however many blocks are free."""
        moves = self._memory.moves
        if self._running_set.adapters.awaits(sequence):
            return True
        if moves is not None and moves.loads.awaits(sequence):
            return True
        return sequence.num_pending_tokens > 0 or self._beams.has_reported(sequence)

    def serve(self, sequence: Sequence, budget: StepBudget) -> int:
        """Take the next chunk of a prefilling sequence from the budget, and report it to the
        policy."""
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
        """Number of tokens to compute next: limited by the budget and by the next snapshot.

        The sequence has a slot for one token at least. Windows' tables grow by free blocks, leaving
        a spare block for each running sequence.
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
