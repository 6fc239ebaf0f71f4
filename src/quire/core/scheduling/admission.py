"""Admits waiting sequences in the policy's order, as long as rows, blocks and token budget suffice.

`capacity_check` says whether a sequence fits. The scheduler calls Admission twice a step: before
and after it plans the running sequences.
"""

from bisect import bisect_left
from dataclasses import dataclass

from quire.core.memory.kv_cache_manager import KVCacheManager
from quire.core.memory.prefix_index import PrefixMatch
from quire.core.scheduling.beams.scheduling import BeamScheduling
from quire.core.scheduling.capacity_check import CapacityCheck, Verdict
from quire.core.scheduling.output_length import OutputLengthPredictor
from quire.core.scheduling.pacing import StepBudget
from quire.core.scheduling.plan_builder import PlanBuilder
from quire.core.scheduling.policy import Policy
from quire.core.scheduling.running_set import RunningSet, rank_of
from quire.core.scheduling.waiting import WaitingQueue
from quire.core.sequence import Sequence, SequenceState

# Maximum number of sequences that are admitted ahead of a waiting sequence that does not fit.
MAX_OVERTAKEN = 32
# Maximum number of sequences that do not fit and that one step passes over.
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

    @property
    def num_prompts(self) -> int:
        """Number of waiting prompts that have room to run.

        While blocks are short, it is 0, because memory and not the pace limits admission.
        """
        if self.capacity.is_crowded:
            return 0
        return min(len(self._waiting), self._running_set.num_room)

    def estimate_prompt_tokens(self) -> int:
        """Estimate the tokens of the waiting prompts that have room to run.

        Assumes the mean length of all waiting prompts, and that none of their tokens are cached.
        Forks count only the tokens that they do not share with their parents.
        """
        num_prompts = self.num_prompts
        return num_prompts and self._waiting.num_tokens * num_prompts // len(self._waiting)

    def make_room_for_first(self) -> None:
        """If the first waiting sequence outranks other sequences, take the blocks that it needs
        from them.

        A new sequence takes blocks from running sequences only if the policy allows that, or if no
        running sequence can compute.
        """
        # First, find the sequence, and whether it may take blocks from running sequences.
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
        is_reading = running_set.content_loads.is_reading_at(head, match.num_tokens)
        if is_reading or self.capacity.follows(head, match):
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
        """Take from other sequences the blocks that a waiting sequence needs, and num_spare more,
        into which running sequences can grow.

        A taken block may have been in the cached prefix of the sequence itself, so its need is
        computed again until enough blocks are free.
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
        """Admit sequences in the policy's order while rows, blocks and token budget last.

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
                break  # too little budget is left; it is first in the next step
            found = self.capacity.check(sequence, step_id)
            if isinstance(found, PrefixMatch):
                self.admit(sequence, found, step_id, now_s)
                chunks[sequence] = self.schedule_prefill(sequence, budget)
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
                    self._pass_on_loaded_blocks(passed_over, drawn)
                    break
        if not len(self._waiting):
            self.capacity.is_crowded = False

    def _pass_on_loaded_blocks(self, passed_over: list[Sequence], drawn: set[Sequence]) -> None:
        """Release blocks that were loaded for sequences further back in the queue, so that a
        passed-over sequence fits: the first for which these blocks suffice.

        `drawn` are the sequences that this step has considered. All others come after the
        passed-over ones and can't be admitted now. Without the release, their loaded blocks would
        stay held until running sequences end, and could block the whole queue.
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
        sequence.stop_waiting_for_fork()
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
        """See `GrowthForecast.fits_later`; used for forks that get a row without waiting in the
        queue."""
        return self.capacity.forecast.fits_later(sequence, num_new_blocks)

    def observe_end(self, sequence: Sequence) -> None:
        """Update the prediction of output lengths with a sequence that has ended."""
        self.capacity.observe_end(sequence)
        if not len(self._waiting):  # the sequence may have been the last waiting one
            self.capacity.is_crowded = False

    def _is_early(self, sequence: Sequence) -> bool:
        """Whether the sequence can't continue yet, however many blocks are free."""
        moves = self._memory.moves
        if self._running_set.adapters.is_reading(sequence.adapter):
            return True
        if moves is not None and moves.loads.awaits(sequence):
            return True
        return sequence.num_pending_tokens > 0 or self._beams.has_reported(sequence)

    def schedule_prefill(self, sequence: Sequence, budget: StepBudget) -> int:
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

    def chunk(self, sequence: Sequence, budget: StepBudget, *, is_replay: bool = False) -> int:
        """Number of tokens to compute next, within the budget, and at most up to the next snapshot
        or the first content that is not ready.

        is_replay: the sequence is a decoding row; see `StepBudget.take_replay`.

        The sequence must have slots for the next token and for all tokens that must be computed
        together with it. If the next token belongs to a content, this content must be ready.
        The block tables of its sliding windows grow as far as free blocks allow, but leave each
        running sequence blocks to grow.
        """
        memory, computed = self._memory, sequence.num_computed_tokens
        num_wanted = memory.snapshots.tokens_to_stop(sequence, sequence.num_tokens - computed)
        contents, has_contents = self._running_set.content_loads, bool(sequence.content_spans)
        if has_contents:
            most = budget.num_tokens + is_replay
            num_wanted = contents.prepare(sequence, computed, min(num_wanted, most))
            assert num_wanted, f"{sequence} waits for a content"
        num_slots = sequence.num_slots
        if computed + num_wanted > num_slots:
            num_spare = len(self._running_set.running) * memory.num_blocks_to_grow
            num_blocks = max(0, memory.pool.num_free - num_spare) // len(memory.growth.growing)
            num_wanted = min(num_wanted, num_slots + num_blocks * memory.block_size - computed)
        if is_replay:
            chunk = budget.take_replay(computed, num_wanted)
        else:
            chunk = budget.take_chunk(
                computed,
                num_wanted,
                wants_logprobs=sequence.needs_prompt_logprobs,
                spans=sequence.content_spans,
            )
        if has_contents:
            contents.load(sequence, computed, computed + chunk)
        if computed + chunk > num_slots:
            grown = memory.grow(sequence, computed + chunk)
            assert grown is not None, "free blocks were counted, but are not there"
            self._builder.edit_tables(grown)
        return chunk
