"""The scheduler: plans each step and applies its result.

It has one rule: close the gap between a sequence's computed tokens and its tokens, within the
step's token budget. Prefill, chunked prefill, decode and resumption after preemption all follow
that rule. The policy only orders sequences. This file spends the token budget; `admission` starts
waiting sequences that fit; `running_set` handles rows and preemption.

    schedule(now_s) -> StepPlan      the next step, from the state of all sequences
    drafting.add(plan, Drafts)       adds the drafts that the plan orders, before it is executed
    apply(StepResult) -> outputs     adds the sampled tokens; sequences grow and end
    add, fork, abort                 at any moment, in any state

A plan may be made while an earlier step runs (overlap): token counts then run ahead of the known
tokens. Blocks that a step in flight may read stay referenced until that step's result is applied.

`running_set` and `admission` explain why every sequence makes progress. `add` refuses a sequence
that would not fit alone.
"""

from collections import deque
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, replace

from quire.core.content_spans import spans_between
from quire.core.memory.kv_cache_manager import KVCacheManager
from quire.core.request import FinishReason, SequenceOutput
from quire.core.sampling_params import DecodingParams
from quire.core.scheduling.admission import Admission
from quire.core.scheduling.beams.scheduling import BeamScheduling
from quire.core.scheduling.drafts import Drafting
from quire.core.scheduling.fault_isolation import FaultIsolation
from quire.core.scheduling.model_drafts import ModelDrafts
from quire.core.scheduling.options import SchedulerConfig
from quire.core.scheduling.output_length import OutputLengthPredictor
from quire.core.scheduling.pacing import ConstantPacer, Pacer, StepBudget, StepDemand
from quire.core.scheduling.plain_rows import PlainSequences
from quire.core.scheduling.plan_builder import PlanBuilder
from quire.core.scheduling.policy import FcfsPolicy, Policy
from quire.core.scheduling.proposals import Speculator
from quire.core.scheduling.residency import Residency
from quire.core.scheduling.running_set import AppendSlots, RunningSet
from quire.core.scheduling.step_results import (
    StepInFlight,
    extend,
    failure,
    pooled_output,
)
from quire.core.scheduling.waiting import WaitingQueue
from quire.core.sequence import Sequence, SequenceState, find_plain_end
from quire.core.step import Chunk, DraftOrder, StepPlan, StepResult, TokenLogprobs
from quire.errors import (
    RequestNeverFitsError,
    SchedulerStalledError,
)


@dataclass(slots=True)
class SchedulerStats:
    """Counts of steps since the start. Admissions and preemptions are counted where they happen."""

    num_steps: int = 0
    num_failed_steps: int = 0


class Scheduler:
    """Continuous batching over one pool of KV blocks.

    Invariant: until it ends, a sequence either waits (WAITING or PREEMPTED, in `waiting`) or runs
    (in `running_set.running`). The tables of a running sequence cover its computed tokens.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        memory: KVCacheManager,
        policy: Policy | None = None,
        lengths: OutputLengthPredictor | None = None,
        adapters: Residency | None = None,
        contents: Residency | None = None,
        speculator: Speculator | None = None,
        model_drafts: ModelDrafts | None = None,
    ) -> None:
        """The `policy` serves this scheduler alone; None is first come, first served. `lengths`
        predicts output lengths, for which admission leaves blocks; None learns them from outputs
        that have ended. `adapters` has the slots of LoRA adapters, `contents` those of prompts'
        contents; None means there are none. `speculator` guesses tokens, and steps verify these
        drafts; None means that no row has drafts. `model_drafts` plans the drafts of the runner's
        drafter; None if it has none."""
        self.config = config
        self.memory = memory
        #: Sets each step's token budget. May be replaced while no step is in flight.
        self.pacer: Pacer = ConstantPacer()
        #: The budget of the step that was planned last.
        self.budget = self.pacer.open_step(StepDemand(0))
        self.policy = policy or FcfsPolicy()
        self.stats = SchedulerStats()
        self.waiting = WaitingQueue(self.policy, lambda sequence: memory.match(sequence).num_tokens)
        self._builder = PlanBuilder()
        self.adapters = adapters or Residency()
        self.contents = contents or Residency()
        self.running_set = RunningSet(
            config.max_num_seqs, memory, self._builder, self.waiting, self.adapters, self.contents
        )
        self._slots = AppendSlots(
            memory, self.running_set, self._builder, config.num_lookahead_blocks
        )
        #: Adds drafts to steps; None if no row has drafts.
        self.drafting: Drafting | None = None
        if speculator is not None:
            self.drafting = Drafting(
                speculator,
                memory,
                self.running_set,
                self._slots,
                config.num_draft_tokens,
                model_drafts,
            )
        self.beams = BeamScheduling(
            self.policy, memory, self.running_set, self._slots, self._builder
        )
        self.admission = Admission(
            self.policy,
            self.waiting,
            self.running_set,
            memory,
            self.beams,
            self._builder,
            lengths or OutputLengthPredictor(),
        )
        self._fault_isolation = FaultIsolation()
        self._in_flight: deque[StepInFlight] = deque()
        #: The sequences that decode without a check.
        self._plain = PlainSequences()
        #: The places of outputs that may begin or end a branch in the list that `apply` returned
        #: last. The others have one token each.
        self.event_places: list[int] = []
        #: Number of running sequences that the last plan left out, to wait for a step or a mask.
        self.num_paused = 0
        self._num_added = 0
        self._next_step_id = 0

    @property
    def running(self) -> list[Sequence]:
        """The sequences with a row, by rank."""
        return self.running_set.running

    @property
    def has_unfinished(self) -> bool:
        return bool(self.running_set.running or len(self.waiting))

    @property
    def num_steps_in_flight(self) -> int:
        return len(self._in_flight)

    # ---- adding and ending ------------------------------------------------------------------

    def add(self, branches: list[Sequence], now_s: float = 0.0) -> None:
        """Add the new branches of one request, equal but for their branch_index.

        The first branch computes the prompt, and the other branches fork from it. Raises
        RequestNeverFitsError for a request that could never finish; then no branch was added.
        """
        first = branches[0]
        assert 0 < first.num_tokens < first.max_num_tokens, first
        self.memory.check_fits(first)
        width, num_rows = first.params.beam_width, self.config.max_num_seqs
        if width > num_rows:
            raise RequestNeverFitsError(
                f"beam_width is {width}, but at most max_num_seqs={num_rows} sequences run at"
                " once; lower beam_width or raise max_num_seqs"
            )
        self.memory.share_prompt(branches)
        for sequence in branches:
            self._enter(sequence, now_s)
        if first.is_beam:
            self.beams.start(first)

    def fork(
        self, parent: Sequence, branch_index: int, params: DecodingParams, now_s: float = 0.0
    ) -> Sequence:
        """Add a new branch that continues from the confirmed tokens of `parent`, which is not
        finished.

        The branch shares the blocks of `parent` as soon as it gets a row. Its limits count as if it
        had generated all its tokens itself; log-probabilities of the prompt are not returned again.
        Raises RequestNeverFitsError for a branch that could never finish, and InvalidRequestError
        if the memory can't share blocks.
        """
        assert not parent.is_finished and not parent.is_beam, parent
        child = parent.branch(branch_index, replace(params, prompt_logprobs=None))
        self.memory.check_fits(child, is_fork=True)
        child.fork_from(parent)
        self._enter(child, now_s)
        return child

    def abort(self, sequence: Sequence) -> None:
        """End a sequence in any state; no later step computes it or holds blocks for it.

        Aborting a beam ends its whole search.
        """
        for member in self.beams.members_with(sequence):
            if not member.is_finished:
                self._finish(member, FinishReason.ABORT)
        self.beams.forget(sequence)

    def _enter(self, sequence: Sequence, now_s: float) -> None:
        sequence.arrival_s = now_s
        sequence.order = self._num_added
        self._num_added += 1
        self.running_set.add_demand(sequence)
        self.waiting.enter(sequence, now_s)

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        if sequence.state is not SequenceState.RUNNING:
            self.waiting.remove(sequence)
        self.running_set.remove(sequence)
        sequence.finish_reason = reason
        sequence.move_to(SequenceState.FINISHED)
        sequence.stop_waiting_for_fork()
        if sequence.forks:  # the first waiting fork becomes the parent of the others
            heir, *others = sequence.forks
            heir.stop_waiting_for_fork()
            for child in others:
                child.stop_waiting_for_fork()
                child.parent = heir
                child.num_common_tokens = min(child.num_common_tokens, heir.num_common_tokens)
                heir.forks.append(child)
        self.running_set.end_demand(sequence)
        self.policy.on_leave(sequence)
        self.admission.observe_end(sequence)
        if self.drafting is not None:
            self.drafting.speculator.end(sequence)

    # ---- planning ---------------------------------------------------------------------------

    def schedule(self, now_s: float) -> StepPlan | None:
        """Plan the next step; None if nothing can be computed before a step in flight has ended.

        now_s: engine time, in seconds from any fixed point. Raises SchedulerStalledError if there
        is work, but no step in flight and no possible progress.
        """
        # First, advance moves and reads, and free the blocks that windows have passed.
        self.memory.set_time(now_s)
        self.adapters.refresh()
        self.contents.refresh()
        if self.memory.growth.windows:
            for sequence in self.running:
                self._builder.edit_tables(self.memory.forget_passed(sequence))
        # Then choose the tokens of each sequence; a suspected sequence runs alone.
        chunks: dict[Sequence, int] = {}
        if self.drafting is not None:
            self.drafting.begin()
        suspect = self._fault_isolation.next_suspect()
        self.num_paused = 0
        if suspect is not None:
            self._plain.leave_all()
            self._plan_alone(suspect, chunks, now_s)
            joins: list[Sequence] = []
        else:
            joins = self._plan_all(chunks, now_s)
        self.running_set.content_loads.end_plan()
        # Nothing to compute is an error unless a step, mask, move, adapter or content is awaited.
        # A mask may be ready by now for which the plan left a row out, so no mask is asked again.
        if not chunks and not self._plain:
            awaits = self._in_flight or self.num_paused or _moves_blocks(self.memory)
            num_reading = self.adapters.num_reading + self.contents.num_reading
            if self.has_unfinished and not awaits and not num_reading:
                raise SchedulerStalledError(_describe(self))
            return None
        # Last, count the tokens as computed and let forks join the step.
        self._plain.plan_changed(chunks)
        if self.policy.counts_steps:
            self.policy.on_step(now_s)
        step, named = self._launch(chunks)
        orders: tuple[DraftOrder, ...] = ()
        if self.drafting is not None and not self.drafting.is_idle:
            named += self.drafting.launch(step)
            orders = self.drafting.order(step)
        self.pacer.launch(step.step_id)
        if self.memory.moves is not None:
            self.memory.moves.launch(step.step_id, dict.fromkeys(self._plain, 1) | chunks)
        self._join_forks(step, joins)
        num_rows = len(self.running)
        return self._builder.build(step.step_id, num_rows, step.num_tokens, named, orders)

    def _plan_all(self, chunks: dict[Sequence, int], now_s: float) -> list[Sequence]:
        """Fill `chunks` from all sequences but the plain ones. Returns the sequences whose forks
        may join this step."""
        # First, let the first waiting sequence take memory from those that it outranks.
        self.waiting.refresh(now_s)
        self.admission.make_room_for_first()
        num_preemptions = self.running_set.stats.num_preemptions
        # Then plan the running sequences, and admit waiting ones with the rest of the budget.
        budget = self._plan_running(chunks)
        has_preempted = self.running_set.stats.num_preemptions != num_preemptions
        # After a preemption, admit only if no other work is left: a new sequence would take the
        # freed blocks.
        if has_preempted and (chunks or self._plain or self._in_flight):
            return []
        if has_preempted:  # the first waiting sequence may need blocks that loads still hold
            self.admission.make_room_for_first()
        self.admission.admit_waiting(chunks, budget, self._next_step_id, now_s)
        # Last, add drafts to decoding rows, within the tokens and time that are left.
        drafting = self.drafting
        if drafting is not None and not drafting.is_idle and not drafting.plan(chunks, budget):
            self._plain.rejoin(chunks)
        if not len(self.waiting):  # so there are no forks
            return []
        return [
            sequence
            for sequence in self.running
            if sequence.forks
            and (count := chunks.get(sequence, int(sequence in self._plain)))
            and sequence.num_computed_tokens + count == sequence.num_tokens
        ]

    def _plan_alone(self, suspect: Sequence, chunks: dict[Sequence, int], now_s: float) -> None:
        """Plan a step for one suspect while the other sequences pause, so that only it can be at
        fault. It gets no drafts: its step is to show whether its own tokens make steps fail."""
        if self._in_flight:
            return
        self.budget = budget = self.pacer.open_step(StepDemand(self.config.max_num_batched_tokens))
        # A suspect without a row is admitted first, at the expense of all others.
        contents = self.running_set.content_loads
        if suspect.state is not SequenceState.RUNNING:
            while not self.running_set.free_rows:
                self.running_set.preempt(self.running[-1], 0)
            self.running_set.free_adapter_slot(suspect, from_all=True)
            adapter = suspect.adapter
            if not self.adapters.has_slot_for(adapter) or not self.adapters.prepare(adapter):
                return  # its adapter, or the adapters in the slots, are still being read
            self.admission.reclaim_for(suspect, from_all=True)
            match = self.memory.match(suspect)
            if self.memory.num_blocks_to_admit(suspect, match) > self.memory.pool.num_free:
                return  # moves between tiers still hold blocks that it needs
            if not contents.prepare(suspect, match.num_tokens, 1):
                return  # its content is still being read
            self.admission.admit(suspect, match, self._next_step_id, now_s)
        elif not contents.prepare(suspect, suspect.num_computed_tokens, 1):
            return  # its content is still being read
        elif suspect.next_cut > suspect.num_slots or suspect.shares_tail:
            num_wanted = self.memory.copy_on_write.num_blocks([suspect])
            self.running_set.reclaim_from_all(suspect, num_wanted)
            if self.memory.pool.num_free < num_wanted:
                return
            self._slots.append(suspect, self._next_step_id)
        chunks[suspect] = self.admission.chunk(suspect, budget)

    def _plan_running(self, chunks: dict[Sequence, int]) -> StepBudget:
        """Give tokens to running sequences: one to each that decodes, then chunks by rank.

        Decoding rows come first at any rank: each costs one token, and the budget has room for all
        of them, while one long prompt could take the whole budget. Then they replay drafts. The
        tokens of plain sequences are not in `chunks`.
        """
        partial: list[Sequence] = []
        replays: list[Sequence] = []
        # Sequences may have to wait for a step in flight: with drafts, or else with states.
        drafting = self.drafting if self._in_flight else None
        snapshots = self.memory.snapshots
        awaits = snapshots.awaits if snapshots.enabled else None
        awaits = awaits if drafting is None else drafting.awaits
        # First, find the sequences that don't decode without any check: only a few.
        may_draft = self.drafting is not None and not self.drafting.is_idle  # no row is plain
        due, others = self._plain.find_others(self.running, may_draft or awaits is not None)
        plain: list[Sequence] = []
        num_paused = 0
        # Then give one token to each other decoding row, and collect the rows that need a chunk.
        for sequence in others:
            if sequence.row is None:
                continue  # it was preempted for a sequence that it follows
            computed = sequence.num_computed_tokens
            if computed < sequence.plain_end and awaits is None:
                plain.append(sequence)
                continue
            num_tokens = len(sequence.token_ids) + sequence.num_pending_tokens
            gap = num_tokens - computed
            if awaits is not None and awaits(sequence):
                num_paused += drafting is not None
            elif gap > 1:
                # A row whose content is being read waits, before any block is copied for it.
                loads = self.running_set.content_loads
                if sequence.content_spans and not loads.prepare(sequence, computed, 1):
                    continue
                is_replay = self.drafting is not None and self.drafting.is_replay(sequence, gap)
                if is_replay and sequence.constraint and not sequence.constraint.is_ready:
                    num_paused += 1
                elif self._slots.make_writable(sequence, self._next_step_id):
                    (replays if is_replay else partial).append(sequence)
            # Nothing to compute, a step in flight ends it, or it was planned with its beams.
            elif not gap or num_tokens >= sequence.max_num_tokens or sequence in chunks:
                continue
            elif sequence.constraint is not None and (
                sequence.num_pending_tokens or not sequence.constraint.is_ready
            ):
                num_paused += 1  # its mask needs its last token, which is still unknown
            elif sequence.is_beam:
                for beam in self.beams.make_writable(sequence, self._next_step_id):
                    chunks[beam] = 1
            elif (
                computed < sequence.num_slots and not sequence.shares_tail
            ) or self._slots.make_writable(sequence, self._next_step_id):
                has_decoded = sequence.plain_end > 0  # else the step may begin its output
                if self.drafting is None or not self.memory.growth.states:
                    sequence.plain_end = find_plain_end(sequence)
                if has_decoded and computed < sequence.plain_end:
                    plain.append(sequence)
                else:
                    chunks[sequence] = 1
        self._plain.settle(due, plain, chunks, may_stay=not may_draft)
        # If a beam was preempted, so were all beams of its search, including beams already planned
        # or collected. Other sequences take blocks only from those of a later rank.
        if self.memory.growth.bounded:
            for sequence in [each for each in chunks if each.row is None]:
                del chunks[sequence]
            replays = [each for each in replays if each.row is not None]
            partial = [each for each in partial if each.row is not None]
        return _plan_chunks(self, chunks, partial, replays, num_paused)

    def _launch(self, chunks: dict[Sequence, int]) -> tuple[StepInFlight, tuple[Chunk, ...]]:
        """Count the planned tokens as computed, and keep the step's record until its result is
        fetched."""
        # First the plain rows. Steps with the same plain rows follow each other, and share them.
        step_id, plain = self._next_step_id, self._plain
        step = StepInFlight(step_id, self.running_set.num_released, plain.launch(step_id))
        self._next_step_id += 1
        rows = step.rows
        # Then all others.
        named: list[Chunk] = []
        # The step may copy a state for a row that got no tokens; then it holds the row's blocks.
        may_copy = bool(self.memory.growth.states and self._builder.copies)
        num_tokens = num_sampling = len(plain)
        for sequence in plain.others(self.running):
            num_new_tokens = chunks.get(sequence, 0)
            row = sequence.row
            assert row is not None
            computed = sequence.num_computed_tokens + num_new_tokens
            closes_gap = computed == sequence.num_tokens
            if num_new_tokens != 1 or not closes_gap:
                if num_new_tokens == 0:
                    named.append(Chunk(row, 0))
                    if may_copy:
                        sequence.last_step_id = step_id
                    continue
                if not sequence.draft_token_ids:  # else `Drafting.launch` names it
                    named.append(Chunk(row, num_new_tokens))
            num_tokens += num_new_tokens
            sequence.num_computed_tokens = computed
            sequence.last_step_id = step_id
            rows[row] = (sequence, sequence.num_admissions, computed)
            if closes_gap:
                sequence.num_pending_tokens += 1
                num_sampling += 1
        step.num_tokens, step.num_sampling = num_tokens, num_sampling
        self._in_flight.append(step)
        return step, tuple(named)

    def _join_forks(self, step: StepInFlight, parents: list[Sequence]) -> None:
        """Give rows to the forks of sequences that close their gap in this step.

        A fork shares its parent's blocks and samples from the same logits.
        """
        memory, running_set = self.memory, self.running_set
        for parent in parents:
            num_used = -(-parent.num_computed_tokens // memory.block_size)
            if memory.growth.growing and parent.num_slots != num_used * memory.block_size:
                continue  # the parent has blocks reserved ahead: its forks are admitted normally
            for child in list(parent.forks):
                num_spare = (len(running_set.running) + 1) * memory.growth.num_copied
                is_equal = child.num_common_tokens == len(child.token_ids) == len(parent.token_ids)
                if not is_equal or parent.num_pending_tokens > 1:
                    continue
                if (
                    not running_set.free_rows
                    or memory.pool.num_free < num_spare
                    or not self.admission.fits_later(child, memory.growth.num_copied)
                ):
                    break
                self._join_fork(step, child, parent)

    def _join_fork(self, step: StepInFlight, child: Sequence, parent: Sequence) -> None:
        self.waiting.remove(child)
        child.stop_waiting_for_fork()
        child.prompt_logprobs = parent.prompt_logprobs  # one list: it may still be filled
        child.num_cached_tokens = parent.num_cached_tokens
        self.memory.fork(child, parent)
        self.admission.count_first(child, self.memory.now_s)
        child.num_admissions += 1
        child.num_pending_tokens = 1
        child.last_step_id = step.step_id
        self.running_set.assign_row(child)
        self._builder.fork(child, parent, joins_step=True)
        assert child.row is not None
        step.rows[child.row] = (child, child.num_admissions, child.num_computed_tokens)
        step.num_sampling += 1

    # ---- results ----------------------------------------------------------------------------

    def apply(self, result: StepResult) -> list[SequenceOutput]:
        """Apply the result of the oldest step in flight; sequences that end free their blocks."""
        # First, free the blocks that only this step read, and publish those that it filled.
        step = self._in_flight.popleft()
        assert step.step_id == result.step_id, f"step {step.step_id} is before {result.step_id}"
        num_answered = len(result.rows) + len(result.failed)
        assert num_answered == step.num_sampling, f"{num_answered} of {step.num_sampling} rows came"
        self.stats.num_steps += 1
        self.memory.end_step(step.step_id)
        token_ids = step.split(result, self.running_set.num_released)
        self._plain.apply(step.plain)
        step.confirm(result, token_ids, self.memory)
        outputs = step.plain.outputs(token_ids)
        if self.policy.counts_service:
            for sequence in step.plain.sequences:
                self.policy.on_service(sequence, 0, 1)
        # Then append the tokens of all other rows, and end sequences that are complete or failed.
        # The outputs keep the order of the result.
        places: list[int] = []
        self.event_places = places
        num_dropped = 0  # results without an output of their own
        for at, row in enumerate(result.rows) if step.rows else ():
            if row not in step.rows:
                continue
            found = _apply_row(self, step, row, result.token_ids[at], result)
            place = at - num_dropped
            outputs[place:place] = found
            places += range(place, place + len(found))
            num_dropped += 1 - len(found)
        num_applied = len(outputs)
        for row, message in result.failed.items():
            outputs += self.fail(step.rows[row][0], message)
        places += range(num_applied, len(outputs))
        if self.drafting is not None and (step.drafts or step.drafts_s):
            self.drafting.end(step, result)
        if self._fault_isolation.next_suspect() is not None:
            of_rows = [step.rows[row][0] for row in result.rows if row in step.rows]
            self._fault_isolation.clear([*step.plain.sequences, *of_rows])
        return outputs

    def _apply_beam(self, sequence: Sequence, entry: TokenLogprobs) -> list[SequenceOutput]:
        outcome = self.beams.add_candidates(sequence, entry)
        for beam in outcome.ended:
            self._finish(beam, FinishReason.STOP)
        if outcome.outputs:
            self.beams.forget(sequence)
        return outcome.outputs

    def fail(self, sequence: Sequence, message: str) -> list[SequenceOutput]:
        """End a sequence, or the whole beam search that it belongs to, with an error."""
        if sequence.is_finished:
            return []
        for member in self.beams.members_with(sequence):
            self._finish(member, FinishReason.ERROR)
        self.beams.forget(sequence)
        num_branches = sequence.params.beam_width
        if num_branches:
            return [failure(sequence, message, index) for index in range(num_branches)]
        return [failure(sequence, message)]

    def recover(self, message: str | None) -> list[SequenceOutput]:
        """Start again after a step failed as a whole and the runner dropped all rows.

        Sequences continue from the tokens that were written before the steps in flight. A sequence
        that makes steps fail is found by trials (see `fault_isolation`) and ends with `message`.
        None: no sequence is at fault, since the step was interrupted from outside.
        """
        self.stats.num_failed_steps += 1
        in_flight = {sequence for step in self._in_flight for sequence in step.sequences}
        self._in_flight.clear()
        self.memory.end_step(self._next_step_id - 1, has_failed=True)
        blamed = None if message is None else self._fault_isolation.blame(in_flight)
        self.running_set.drop_rows()
        outputs: list[SequenceOutput] = []
        if blamed is not None and message is not None:
            outputs = self.fail(blamed, message)
        return outputs


def fail_item(scheduler: Scheduler, digest: str, message: str) -> list[SequenceOutput]:
    """End all sequences that still need an adapter or a content which can't be read, with
    `message`."""
    scheduler.adapters.drop(digest)
    scheduler.contents.drop(digest)
    outputs: list[SequenceOutput] = []
    for sequence in [*scheduler.running, *scheduler.waiting]:
        rest = spans_between(
            sequence.content_spans, sequence.num_computed_tokens, sequence.num_prompt_tokens
        )
        if digest in (sequence.adapter, *(span.digest for span in rest)):
            outputs += scheduler.fail(sequence, message)
    return outputs


def _apply_row(
    scheduler: Scheduler, step: StepInFlight, row: int, token_ids: Tokens[int], result: StepResult
) -> list[SequenceOutput]:
    """Append the tokens that a row has sampled, which is not plain. Returns the outputs."""
    sequence = step.rows[row][0]
    if sequence.is_finished:
        return []
    sequence.num_pending_tokens -= 1
    if scheduler.policy.counts_service:
        scheduler.policy.on_service(sequence, 0, len(token_ids))
    if sequence.is_beam:
        return scheduler._apply_beam(sequence, result.logprobs[row][0])
    if row in result.pooled:
        output = pooled_output(sequence, result.pooled[row])
    else:
        output = extend(sequence, token_ids, result.logprobs.get(row))
    if sequence.finish_reason is not None:
        if scheduler.drafting is not None and step.drafts and row in step.drafts:
            scheduler.drafting.confirm(step, row)  # before its blocks are freed
        scheduler._finish(sequence, sequence.finish_reason)
    return [output]


def _plan_chunks(
    scheduler: Scheduler,
    chunks: dict[Sequence, int],
    partial: list[Sequence],
    replays: list[Sequence],
    num_paused: int,
) -> StepBudget:
    """Open the budget of a step whose decoding rows are plain or in `chunks`, and give its tokens
    to `replays`, and then to `partial`, until it is spent. Returns the budget.

    num_paused: see `StepDemand`.
    """
    scheduler.num_paused, admission = num_paused, scheduler.admission
    num_plain = len(scheduler._plain)
    num_decodes = num_plain + len(chunks) + len(replays)
    num_pairs = num_plain + scheduler._plain.num_computed_tokens
    num_pairs += len(chunks) + sum([sequence.num_computed_tokens for sequence in chunks])
    num_pairs += sum([sequence.num_tokens for sequence in replays])
    num_left = scheduler.config.max_num_batched_tokens - num_decodes
    decodes = StepDemand(num_left, num_decodes, num_pairs, num_paused=num_paused)
    demand = _with_prompts(decodes, partial, admission)
    scheduler.budget = budget = scheduler.pacer.open_step(demand)
    for sequence in replays:
        chunks[sequence] = admission.chunk(sequence, budget, is_replay=True)
    for sequence in partial:
        if not budget.is_spent and sequence.state is SequenceState.RUNNING:
            chunks[sequence] = admission.schedule_prefill(sequence, budget)
    return budget


def _with_prompts(demand: StepDemand, partial: list[Sequence], admission: Admission) -> StepDemand:
    """Return the demand of decoding rows plus the demand of prompts: of running sequences that want
    chunks (`partial`), and of sequences that may be admitted."""
    num_left = sum([sequence.num_tokens - sequence.num_computed_tokens for sequence in partial])
    return demand._replace(
        num_prompts=len(partial) + admission.num_prompts,
        num_prompt_tokens=num_left + admission.estimate_prompt_tokens(),
        count_expected=admission.capacity.forecast.num_all_remaining,
    )


def _moves_blocks(memory: KVCacheManager) -> bool:
    """Whether moves between tiers may free blocks, or finish a load, without a step."""
    return memory.moves is not None and memory.moves.num_in_flight > 0


def _describe(scheduler: Scheduler) -> str:
    pool = scheduler.memory.pool
    return (
        f"no progress is possible: {len(scheduler.running)} running, {len(scheduler.waiting)}"
        f" waiting, {pool.num_free} of {pool.num_blocks} blocks free, first running"
        f" {scheduler.running[:1]}, first waiting {scheduler.waiting.head()}"
    )
