"""Who waits comes in: in the order of the policy, as far as rows, blocks and budget last.

The scheduler calls it once a step, before and after the running sequences were planned.
"""

from bisect import bisect_left
from dataclasses import dataclass

from quire.core.memory.kv_cache_manager import KVCacheManager
from quire.core.memory.prefix_index import PrefixMatch
from quire.core.scheduling.beams.scheduling import BeamScheduling
from quire.core.scheduling.capacity import RoomFinder, Verdict
from quire.core.scheduling.pacing import StepBudget
from quire.core.scheduling.plan_builder import PlanDraft
from quire.core.scheduling.policy import Policy
from quire.core.scheduling.running_set import Residents, rank_of
from quire.core.scheduling.waiting import WaitingQueue
from quire.core.sequence import Sequence, SequenceState

# A waiting sequence that finds no room lets this many others pass, and then nobody any more.
MAX_OVERTAKEN = 32
# So many that find no room are passed over in one step.
MAX_PASSED_OVER = 4


@dataclass(slots=True)
class AdmissionStats:
    """queue_s: waiting before first admission, summed."""

    num_admissions: int = 0
    queue_s: float = 0.0


class Admission:
    """Moves sequences from `waiting` to `residents`.

    Nothing is admitted in a step that preempted (the scheduler sees to that), nobody overtakes a
    preempted sequence, and a new one may be overtaken MAX_OVERTAKEN times.
    """

    def __init__(
        self,
        policy: Policy,
        waiting: WaitingQueue,
        residents: Residents,
        memory: KVCacheManager,
        beams: BeamScheduling,
        draft: PlanDraft,
    ) -> None:
        self.room = RoomFinder(memory, residents, can_outrank=policy.can_outrank)
        self.stats = AdmissionStats()
        self._policy = policy
        self._waiting = waiting
        self._residents = residents
        self._memory = memory
        self._beams = beams
        self._draft = draft

    def make_room_for_first(self) -> None:
        """If the first waiting sequence outranks others, take from them what it needs.

        A new one takes from running ones only if the policy lets it, or if nobody runs.
        """
        head = next((one for one in self._waiting.candidates() if not self._is_early(one)), None)
        if head is None:
            return
        residents, memory = self._residents, self._memory
        is_idle = residents.is_idle
        may_take = self._policy.can_outrank or head.state is SequenceState.PREEMPTED
        outranked = bool(residents.running) and head.rank < residents.running[-1].rank
        if not is_idle and not (may_take and outranked):
            return
        match = memory.match(head)
        if self.room.follows(head, match):
            return
        num_spare = 0
        if not is_idle:
            num_outranking = bisect_left(residents.running, head.rank, key=rank_of)
            num_spare = num_outranking * memory.num_blocks_to_grow
            needed = memory.num_blocks_to_admit(head, match) + num_spare
            if not self._could_take(needed, head.rank):
                return
        self.clear_way(head, num_spare, from_all=is_idle)
        if not residents.free_rows:
            residents.preempt(residents.running[-1], 0)

    def clear_way(self, sequence: Sequence, num_spare: int = 0, *, from_all: bool = False) -> None:
        """Take from others what a waiting sequence needs, and num_spare blocks for others yet.

        What is taken may be what it would have shared: so look again until there is enough.
        """
        memory = self._memory
        sequence.look_again_at = 0  # what it lacked is there now
        num_free_before = -1
        while num_free_before < memory.num_free_soon:
            num_free_before = memory.num_free_soon
            needed = memory.num_blocks_to_admit(sequence, memory.match(sequence)) + num_spare
            if needed <= num_free_before:
                return
            self._residents.reclaim(needed, sequence, from_running=True, from_all=from_all)

    def _could_take(self, num_wanted: int, rank: tuple[float, ...]) -> bool:
        """Whether so many blocks would be free if all who are outranked gave up all they have."""
        residents = self._residents
        outranked = [
            *residents.running[bisect_left(residents.running, rank, key=rank_of) :],
            *residents.preempted[bisect_left(residents.preempted, rank, key=rank_of) :],
        ]
        num_theirs = sum(len(table) for one in outranked for table in one.block_tables)
        return num_wanted <= self._memory.num_free_soon + num_theirs

    def admit_waiting(
        self, chunks: dict[Sequence, int], budget: StepBudget, step_id: int, now_s: float
    ) -> None:
        """Admit in the order of the policy while rows, blocks and budget last.

        Who finds no room is passed over, within bounds; nobody overtakes a preempted one.
        """
        passed_over: list[Sequence] = []
        for sequence in self._waiting.candidates():
            if budget.is_spent or not self._residents.free_rows:
                break
            if self._is_early(sequence):
                continue
            found = self.room.find(sequence, step_id)
            if isinstance(found, PrefixMatch):
                self.admit(sequence, found, step_id, now_s)
                chunks[sequence] = self.serve(sequence, budget)
                for one in passed_over:
                    one.num_overtaken += 1
                if any(one.num_overtaken >= MAX_OVERTAKEN for one in passed_over):
                    break
            elif found is Verdict.NO_ROOM:
                passed_over.append(sequence)
                if (
                    sequence.state is SequenceState.PREEMPTED
                    or sequence.num_overtaken >= MAX_OVERTAKEN
                    or len(passed_over) >= MAX_PASSED_OVER
                ):
                    break
        if not len(self._waiting):
            self.room.is_crowded = False

    def admit(self, sequence: Sequence, match: PrefixMatch, step_id: int, now_s: float) -> None:
        """Waiting -> RUNNING: a row and tables for all tokens known so far."""
        self._waiting.remove(sequence)
        parent = sequence.parent
        sequence.leave_parent()
        if parent is not None and not parent.needs_prompt_logprobs:
            sequence.prompt_logprobs = list(parent.prompt_logprobs)
        is_first = sequence.num_admissions == 0
        self._draft.copy(self._memory.admit(sequence, match, step_id))
        if is_first:
            self.count_first(sequence, now_s)
        self.stats.num_admissions += 1
        self._residents.enter(sequence)
        self._draft.admit(sequence)

    def count_first(self, sequence: Sequence, now_s: float) -> None:
        """Its first admission: how long it waited, and the rank that it keeps from now on."""
        self.stats.queue_s += now_s - sequence.arrival_s
        sequence.first_scheduled_s = now_s
        rank = self._policy.rank_admitted(sequence)
        if rank is not None:
            sequence.rank = (*rank, sequence.order)

    def _is_early(self, sequence: Sequence) -> bool:
        """Whether it can't go on yet, whatever room there is."""
        return sequence.num_pending_tokens > 0 or self._beams.has_reported(sequence)

    def serve(self, sequence: Sequence, budget: StepBudget) -> int:
        """The chunk of a sequence that doesn't decode, taken from the budget; tells the policy."""
        computed = sequence.num_computed_tokens
        chunk = budget.take(
            computed,
            sequence.num_tokens - computed,
            wants_logprobs=sequence.needs_prompt_logprobs,
        )
        if self._policy.counts_service:
            first = max(computed, sequence.num_served_tokens)
            sequence.num_served_tokens = max(first, computed + chunk)
            num_new = min(computed + chunk, sequence.num_prompt_tokens) - first
            if num_new > 0:
                self._policy.on_service(sequence, num_new, 0)
        return chunk
