"""Who computes what in the next step.

One rule: close the gap between a sequence's computed tokens and its tokens, within the step's token
budget. Prefill, chunked prefill, decode and resumption after preemption are all that rule. A policy
orders and does nothing else; budget, admission, allocation and preemption are written here, once.

    schedule(now_s) -> StepPlan      what to compute, from the state of all sequences
    apply(StepResult) -> outputs     what came of it; sequences grow and end
    add, abort                       at any moment, in any state

A plan may be made while an earlier step runs (overlap): counts run ahead of the tokens, and blocks
that a step in flight may read stay referenced until its result was applied.

Progress: ranks are a total order that never changes. The first-ranked sequence may take from all
others, nobody is admitted after growth has preempted, and `add` refuses what would not fit alone;
so the first-ranked sequence always ends, and then the next one is first.
"""

import heapq
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field

from quire.core.kv_cache_manager import KVCacheManager, PrefixMatch, append_edits
from quire.core.policy import Policy, fcfs
from quire.core.request import FinishReason, SequenceOutput
from quire.core.sequence import Sequence, SequenceState
from quire.core.step import Chunk, RowAdmission, StepPlan, StepResult, TableEdit, TokenLogprobs
from quire.core.suspects import Suspects
from quire.errors import ConfigurationError, RequestNeverFitsError, SchedulerStalledError

LOOK_AGAIN_STEPS = 16


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """max_num_seqs: rows of the runner. max_num_batched_tokens: tokens that one step computes at
    most; at least max_num_seqs, so that every running sequence can always decode."""

    max_num_seqs: int = 64
    max_num_batched_tokens: int = 2048

    def __post_init__(self) -> None:
        if self.max_num_seqs < 1:
            raise ConfigurationError(f"max_num_seqs is {self.max_num_seqs}, but must be at least 1")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigurationError(
                f"max_num_batched_tokens is {self.max_num_batched_tokens}, below max_num_seqs,"
                f" {self.max_num_seqs}: a step could not decode every running sequence"
            )


@dataclass(slots=True)
class _StepInFlight:
    """What `apply` needs to know of a step.

    rows: row -> (who was in it, its num_admissions then, tokens written when the step has ended).
    num_sampling: how many of them close their gap and so must come back with a token.
    """

    step_id: int
    rows: dict[int, tuple[Sequence, int, int]] = field(default_factory=dict)
    num_sampling: int = 0


@dataclass(slots=True)
class SchedulerStats:
    """Counts and sums since the start.

    num_preemptions: those by failed steps included. num_recomputed_tokens: computed again after a
    preemption. queue_s: waiting before first admission.
    """

    num_steps: int = 0
    num_admissions: int = 0
    num_preemptions: int = 0
    num_recomputed_tokens: int = 0
    num_failed_steps: int = 0
    queue_s: float = 0.0


class Scheduler:
    """Continuous batching over one pool of KV blocks.

    Invariant: `running` and `waiting` are sorted by rank and disjoint; a sequence is RUNNING if and
    only if it is in `running`, has a row, and its tables cover its computed tokens; a row has one
    running sequence, or is free (and named in the next plan's `release` if it had one).
    """

    def __init__(
        self, config: SchedulerConfig, memory: KVCacheManager, policy: Policy = fcfs
    ) -> None:
        self.config = config
        self.memory = memory
        self.stats = SchedulerStats()
        self.running: list[Sequence] = []
        self.waiting: list[Sequence] = []
        self.free_rows = list(range(config.max_num_seqs))  # a heap
        self._policy = policy
        self._suspects = Suspects()
        self._released_rows: list[int] = []
        self._in_flight: deque[_StepInFlight] = deque()
        self._num_added = 0
        self._next_step_id = 0
        # Who found no room last, when the pool had freed so many blocks; looked up again at a step.
        self._no_room: tuple[Sequence, int] | None = None
        self._look_again_at = 0

    @property
    def has_unfinished(self) -> bool:
        return bool(self.running or self.waiting)

    @property
    def num_steps_in_flight(self) -> int:
        return len(self._in_flight)

    def add(self, sequence: Sequence, now_s: float = 0.0) -> None:
        """Take a new sequence in. Raises RequestNeverFitsError where it could never end."""
        assert 0 < sequence.num_tokens < sequence.max_num_tokens, sequence
        # The last token is sampled, but its K and V are never written.
        needed = self.memory.blocks_for(sequence.max_num_tokens - 1)
        if needed > self.memory.pool.num_blocks:
            raise RequestNeverFitsError(
                f"request {sequence.request_id!r} may grow to {sequence.max_num_tokens} tokens and"
                f" so need {needed} KV blocks, but the pool has {self.memory.pool.num_blocks};"
                " lower max_tokens, or give the engine more kv_cache_memory"
            )
        sequence.arrival_s = now_s
        sequence.order = self._num_added
        sequence.rank = (*self._policy(sequence), sequence.order)
        self._num_added += 1
        insort(self.waiting, sequence, key=_rank)

    def abort(self, sequence: Sequence) -> None:
        """End a sequence in whatever state it is; no later step computes or holds it."""
        if not sequence.is_finished:
            self._finish(sequence, FinishReason.ABORT)

    # ---- planning ---------------------------------------------------------------------------

    def schedule(self, now_s: float) -> StepPlan | None:
        """The next step, or None if nothing can be computed until a step in flight has ended.

        now_s: the engine's clock, seconds from any fixed point.
        Raises SchedulerStalledError if there is work, nothing is in flight and nothing is possible.
        """
        chunks: dict[Sequence, int] = {}
        edits: list[TableEdit] = []
        admissions: list[RowAdmission] = []
        suspect = self._suspects.first()
        if suspect is not None:
            budget = self._plan_trial(suspect, chunks, admissions, now_s)
        else:
            self._yield_to_outranking()
            num_preemptions = self.stats.num_preemptions
            budget = self._plan_running(chunks, edits)
            if self.stats.num_preemptions == num_preemptions:
                budget = self._admit_waiting(chunks, admissions, budget, now_s)
        num_tokens = self.config.max_num_batched_tokens - budget
        if num_tokens == 0:
            if self.has_unfinished and not self._in_flight:
                raise SchedulerStalledError(_describe(self))
            return None
        released, self._released_rows = self._released_rows, []
        return StepPlan(
            step_id=self._next_step_id,
            num_rows=len(self.running),
            num_tokens=num_tokens,
            release=tuple(released),
            admit=tuple(admissions),
            table_edits=tuple(edits),
            chunks=self._launch(chunks),
        )

    def _yield_to_outranking(self) -> None:
        """If the first waiting sequence outranks running ones, preempt as many as it needs."""
        if not self.waiting or not self.running:
            return
        head = self.waiting[0]
        if head.rank > self.running[-1].rank or head.num_pending_tokens or self._find_room(head):
            return
        num_missing = self.memory.num_blocks_to_admit(head, self.memory.match(head))
        outranked = self.running[bisect_left(self.running, head.rank, key=_rank) :]
        num_theirs = sum(len(table) for one in outranked for table in one.block_tables)
        if num_missing > self.memory.num_free_soon + num_theirs:
            return
        for victim in reversed(outranked):
            if self.free_rows and self.memory.num_free_soon >= num_missing:
                return
            self._preempt(victim)

    def _plan_trial(
        self,
        suspect: Sequence,
        chunks: dict[Sequence, int],
        admissions: list[RowAdmission],
        now_s: float,
    ) -> int:
        """A step for one suspect alone, so that nobody else is blamed for it; all others pause."""
        budget = self.config.max_num_batched_tokens
        if self._in_flight:
            return budget
        if suspect.state is not SequenceState.RUNNING:
            while (match := self._find_room(suspect)) is None:
                self._preempt(self.running[-1])
            admissions.append(self._admit(suspect, match, now_s))
        chunks[suspect] = min(budget, suspect.num_tokens - suspect.num_computed_tokens)
        return budget - chunks[suspect]

    def _plan_running(self, chunks: dict[Sequence, int], edits: list[TableEdit]) -> int:
        """Tokens for running sequences: one for each that decodes, then chunks by rank.

        Decodes come first whatever their rank: they cost one token each and the budget has room for
        all of them, while one long prompt would take the whole budget from everyone.
        """
        partial: list[Sequence] = []
        budget = self.config.max_num_batched_tokens
        index = 0
        while index < len(self.running):  # _grow may shorten the list from its end
            sequence = self.running[index]
            index += 1
            gap = sequence.num_tokens - sequence.num_computed_tokens
            if gap > 1:
                partial.append(sequence)
            elif gap and sequence.num_tokens < sequence.max_num_tokens:
                has_slot = sequence.num_computed_tokens < sequence.num_slots
                if has_slot or self._grow(sequence, edits):
                    chunks[sequence] = 1
                    budget -= 1
        for sequence in partial:
            if budget and sequence.state is SequenceState.RUNNING:
                chunk = min(budget, sequence.num_tokens - sequence.num_computed_tokens)
                chunks[sequence] = chunk
                budget -= chunk
        return budget

    def _grow(self, sequence: Sequence, edits: list[TableEdit]) -> bool:
        """One more block in each group, taken from the least important sequence if need be."""
        while True:
            grown = self.memory.grow(sequence, sequence.num_computed_tokens + 1)
            if grown is not None:
                assert sequence.row is not None
                edits.extend(append_edits(sequence.row, grown))
                return True
            if self.memory.num_blocks_held_by_steps:
                return False  # what a step in flight gives back may be enough: pause this row
            victim = self.running[-1]
            self._preempt(victim)
            if victim is sequence:
                return False

    def _admit_waiting(
        self,
        chunks: dict[Sequence, int],
        admissions: list[RowAdmission],
        budget: int,
        now_s: float,
    ) -> int:
        """Admit in rank order while rows, blocks and budget last; returns the budget left."""
        while self.waiting and budget:
            sequence = self.waiting[0]
            match = None if sequence.num_pending_tokens else self._find_room(sequence)
            if match is None:
                break
            admissions.append(self._admit(sequence, match, now_s))
            chunks[sequence] = min(budget, sequence.num_tokens - match.num_tokens)
            budget -= chunks[sequence]
        return budget

    def _find_room(self, sequence: Sequence) -> PrefixMatch | None:
        """What a waiting sequence could start from, if a row and enough blocks are free.

        Leaves each running sequence that outranks it room to grow once, or it is soon preempted.
        Where there was no room and no block was freed since, there is none now, unless others have
        published more of its prefix: that is looked up only now and then.
        """
        pool, steps = self.memory.pool, self._next_step_id
        if not self.free_rows:
            return None
        if (
            self._no_room == (sequence, pool.num_freed)
            and steps < self._look_again_at
            and pool.num_held
        ):
            return None
        num_outranking = bisect_left(self.running, sequence.rank, key=_rank)
        match = self.memory.match(sequence)
        if self.memory.can_admit(sequence, match, num_outranking * self.memory.num_groups):
            return match
        self._no_room, self._look_again_at = (sequence, pool.num_freed), steps + LOOK_AGAIN_STEPS
        return None

    def _admit(self, sequence: Sequence, match: PrefixMatch, now_s: float) -> RowAdmission:
        """Waiting -> RUNNING: a row and tables for all tokens known so far."""
        self.stats.num_admissions += 1
        if sequence.num_admissions == 0:
            self.stats.queue_s += now_s - sequence.arrival_s
        else:
            num_lost = sequence.num_lost_tokens - match.num_tokens
            self.stats.num_recomputed_tokens += max(0, num_lost)
        if sequence.needs_prompt_logprobs:
            sequence.prompt_logprobs.clear()  # computed again from the first position
        _remove(self.waiting, sequence)
        self.memory.admit(sequence, match)
        sequence.row = heapq.heappop(self.free_rows)
        sequence.move_to(SequenceState.RUNNING)
        insort(self.running, sequence, key=_rank)
        return _admission(sequence)

    def _launch(self, chunks: dict[Sequence, int]) -> tuple[Chunk, ...]:
        """Count the planned tokens as computed and remember the step until its result comes."""
        step = _StepInFlight(self._next_step_id)
        self._next_step_id += 1
        named: list[Chunk] = []
        for sequence in self.running:
            num_new_tokens = chunks.get(sequence, 0)
            row = sequence.row
            assert row is not None
            computed = sequence.num_computed_tokens + num_new_tokens
            closes_gap = computed == sequence.num_tokens
            if num_new_tokens != 1 or not closes_gap:
                named.append(Chunk(row, num_new_tokens))
                if num_new_tokens == 0:
                    continue
            sequence.num_computed_tokens = computed
            sequence.last_step_id = step.step_id
            step.rows[row] = (sequence, sequence.num_admissions, computed)
            if closes_gap:
                sequence.num_pending_tokens += 1
                step.num_sampling += 1
        self._in_flight.append(step)
        return tuple(named)

    # ---- results ----------------------------------------------------------------------------

    def apply(self, result: StepResult) -> list[SequenceOutput]:
        """Take in what the oldest step in flight sampled; ended sequences give all back."""
        step = self._in_flight.popleft()
        assert step.step_id == result.step_id, f"step {step.step_id} is before {result.step_id}"
        num_answered = len(result.rows) + len(result.failed)
        assert num_answered == step.num_sampling, f"{num_answered} of {step.num_sampling} rows came"
        self.stats.num_steps += 1
        self.memory.end_step(step.step_id)
        self._take_in_prompts(step, result)
        outputs: list[SequenceOutput] = []
        for row, token_ids in zip(result.rows, result.token_ids, strict=True):
            sequence = step.rows[row][0]
            if not sequence.is_finished:
                sequence.num_pending_tokens -= 1
                outputs.append(_extend(sequence, token_ids, result.logprobs.get(row)))
                if sequence.finish_reason is not None:
                    self._finish(sequence, sequence.finish_reason)
        for row, message in result.failed.items():
            sequence = step.rows[row][0]
            if not sequence.is_finished:
                self._finish(sequence, FinishReason.ERROR)
                outputs.append(_failure(sequence, message))
        if self._suspects.first() is not None:
            self._suspects.clear(step.rows[row][0] for row in result.rows)
        return outputs

    def _take_in_prompts(self, step: _StepInFlight, result: StepResult) -> None:
        """Publish the blocks that the step filled, and keep the log-probabilities of prompts."""
        for row, prompt_logprobs in result.prompt_logprobs.items():
            sequence, num_admissions, _ = step.rows[row]
            is_current = sequence.num_admissions == num_admissions and row not in result.failed
            if is_current and sequence.needs_prompt_logprobs:
                sequence.prompt_logprobs.extend(prompt_logprobs)
        block_size = self.memory.block_size
        for row, (sequence, num_admissions, num_written) in step.rows.items():
            if (
                num_written >= (sequence.num_published_blocks + 1) * block_size
                and sequence.state is SequenceState.RUNNING
                and sequence.num_admissions == num_admissions
                and row not in result.failed
            ):
                self.memory.publish(sequence, num_written)

    def recover(self, message: str | None) -> list[SequenceOutput]:
        """After a step that failed as a whole and a runner that dropped all rows: start again.

        Who is to blame shows itself (see `suspects`); that one ends with `message`. None: nobody
        is, the step was interrupted from outside.
        """
        self.stats.num_failed_steps += 1
        in_flight = {entry[0] for step in self._in_flight for entry in step.rows.values()}
        self._in_flight.clear()
        self.memory.end_step(self._next_step_id)
        blamed = None if message is None else self._suspects.blame(in_flight)
        if blamed is not None:
            self._finish(blamed, FinishReason.ERROR)
        for sequence in [*self.running, *self.waiting]:
            sequence.num_pending_tokens = 0
        for sequence in list(self.running):
            self._preempt(sequence)
        self._released_rows.clear()
        return [] if blamed is None or message is None else [_failure(blamed, message)]

    # ---- rows and blocks --------------------------------------------------------------------

    def _preempt(self, sequence: Sequence) -> None:
        """RUNNING -> PREEMPTED: row and blocks go back, tokens stay."""
        self.stats.num_preemptions += 1
        sequence.num_lost_tokens = sequence.num_computed_tokens
        _remove(self.running, sequence)
        self._give_back(sequence)
        sequence.move_to(SequenceState.PREEMPTED)
        insort(self.waiting, sequence, key=_rank)

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        if sequence.state is SequenceState.RUNNING:
            _remove(self.running, sequence)
            self._give_back(sequence)
        else:
            _remove(self.waiting, sequence)
        sequence.finish_reason = reason
        sequence.move_to(SequenceState.FINISHED)

    def _give_back(self, sequence: Sequence) -> None:
        assert sequence.row is not None
        self._released_rows.append(sequence.row)
        heapq.heappush(self.free_rows, sequence.row)
        sequence.row = None
        is_in_flight = bool(self._in_flight) and sequence.last_step_id >= self._in_flight[0].step_id
        self.memory.free(sequence, sequence.last_step_id if is_in_flight else None)


def _rank(sequence: Sequence) -> tuple[float, ...]:
    return sequence.rank


def _remove(ranked: list[Sequence], sequence: Sequence) -> None:
    """Take a sequence out of a list sorted by rank; ranks are unique."""
    index = bisect_left(ranked, sequence.rank, key=_rank)
    assert ranked[index] is sequence
    del ranked[index]


def _admission(sequence: Sequence) -> RowAdmission:
    assert sequence.row is not None
    return RowAdmission(
        sequence.row,
        sequence.token_ids,
        sequence.num_prompt_tokens,
        sequence.num_computed_tokens,
        tuple(tuple(table) for table in sequence.block_tables),
        sequence.params,
        sequence.branch_index,
    )


def _extend(
    sequence: Sequence, token_ids: Tokens[int], logprobs: Tokens[TokenLogprobs] | None
) -> SequenceOutput:
    """Add what a step sampled, up to the end of the sequence if it is among it."""
    params = sequence.params
    prompt_logprobs = None
    if params.prompt_logprobs is not None and sequence.num_output_tokens == 0:
        prompt_logprobs = tuple(sequence.prompt_logprobs)
    for num_taken, token_id in enumerate(token_ids, 1):
        if sequence.append(token_id):
            token_ids = token_ids[:num_taken]
            break
    stop_reason = None
    if sequence.finish_reason is FinishReason.STOP:
        last = sequence.token_ids[-1]
        stop_reason = last if last in params.stop_token_ids else None
    return SequenceOutput(
        sequence.request_id,
        sequence.branch_index,
        token_ids,
        sequence.num_cached_tokens,
        sequence.finish_reason,
        stop_reason,
        None if logprobs is None else logprobs[: len(token_ids)],
        prompt_logprobs,
    )


def _failure(sequence: Sequence, message: str) -> SequenceOutput:
    """The output of a sequence that ends with an error."""
    return SequenceOutput(
        sequence.request_id,
        sequence.branch_index,
        (),
        sequence.num_cached_tokens,
        FinishReason.ERROR,
        error=message,
    )


def _describe(scheduler: Scheduler) -> str:
    pool = scheduler.memory.pool
    return (
        f"no progress is possible: {len(scheduler.running)} running, {len(scheduler.waiting)}"
        f" waiting, {pool.num_free} of {pool.num_blocks} blocks free, first running"
        f" {scheduler.running[:1]}, first waiting {scheduler.waiting[:1]}"
    )
