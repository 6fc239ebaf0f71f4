"""Speculation: plans drafts behind decoding rows, and confirms those that a step accepted.

A proposer guesses the tokens that follow a sequence's known tokens. The step verifies these drafts
(see `core.step`). Drafts change no output, and take nothing from other sequences: they get what is
left of the step's budget and of the free blocks once all other tokens are planned.

A row with drafts counts as a row that decodes one token until its result is applied, and waits for
it: the number of its tokens is unknown before. The result tells which drafts count as computed.

Drafts of the runner's drafter come when the plan is made (see `core.step`). They are planned as if
they were known, by what is expected of them, and are put into the plan before the step runs.

A recurrent state can't be cut behind the accepted drafts. So in models with states, the row keeps
the state before its drafts, and no draft counts as computed. The next step *replays* the accepted
drafts: it computes them again, before the row's last token. It may verify further drafts behind
that token. All other parts of the engine see a row that lacks a few tokens.
"""

from collections.abc import Mapping
from collections.abc import Sequence as Tokens
from dataclasses import asdict, replace
from typing import Any

from quire.core.memory.kv_cache_manager import KVCacheManager
from quire.core.scheduling.cost_model import NO_LOAD, SHORTEST_S
from quire.core.scheduling.draft_lengths import choose_lengths, decodes_of, least_tokens
from quire.core.scheduling.draft_options import (
    DraftingRow,
    DraftOption,
    candidates_of,
    cut,
    num_useful,
    with_drafter,
    with_room,
)
from quire.core.scheduling.model_drafts import ModelDrafts, OrderedDrafts
from quire.core.scheduling.pacing import StepBudget
from quire.core.scheduling.proposals import (
    NO_PROPOSAL,
    DraftCounts,
    Proposal,
    Speculator,
)
from quire.core.scheduling.running_set import AppendSlots, RunningSet
from quire.core.scheduling.step_results import StepInFlight
from quire.core.sequence import Sequence, SequenceState
from quire.core.step import Chunk, DraftOrder, Drafts, StepPlan, StepResult

ASKING_S = 40e-6
"""Approximate seconds to ask for drafts, once and for each row in addition (Zen 3, 2026-12)."""

ASKING_SHARE = 0.005
"""Asking in vain takes at most about this share of the time, beside the credit. For a large model,
rows can be asked in each step. For a tiny model, or many rows that rarely get drafts, only some
steps ask. The interval is a number of steps, since an interval in seconds has fewer steps on a busy
machine."""

CREDIT_SHARE = 0.05
"""This share of the time that drafts save is a credit for asking in vain. So sequences with
repetitive parts are asked in each step. In replays of diffs, tool calls, code and prose (steps of
0.4 to 8 ms, one row), shares of 0.05 to 0.2 gave about the same speed, and the smallest lost the
least in prose."""

MOST_CREDIT_S = 64 * ASKING_S
"""Maximum seconds of credit, which an engine begins with."""

LEAST_GAIN = 1.02
"""The drafter is used only if its drafts are expected to give this many times the tokens per second
of the known drafts, or of no drafts. The margin exists because its cost is less certain."""

ASKS_EVERY = 32
"""With overlap, a row waits for its last token to get drafts of the drafter if the last plan that
considered such drafts ordered some. Otherwise it waits once in ASKS_EVERY times."""


_NO_BUDGET = StepBudget(0)  # of a step that has no drafts


class Drafting:
    """Adds drafts to steps.

    Invariant: `draft_token_ids` of a sequence is not empty if and only if a step in flight, or the
    one that is being planned, verifies these drafts.
    """

    def __init__(
        self,
        speculator: Speculator,
        memory: KVCacheManager,
        running_set: RunningSet,
        slots: AppendSlots,
        most: int,
        model: ModelDrafts | None = None,
    ) -> None:
        """most: the largest number of drafts of one sequence in a step. model: plans the drafts of
        the runner's drafter; None if it has none."""
        self.speculator = speculator
        self.model = model
        self._memory = memory
        self._running_set = running_set
        self._slots = slots
        self._most = most
        self._has_states = bool(memory.growth.states)
        #: The sequences that get drafts, each with its drafts and the number of tokens before them.
        self._planned: list[tuple[Sequence, Proposal, int]] = []
        self._ordered: list[OrderedDrafts] = []
        self._launched = StepInFlight(-1)  # the last step with orders
        # The budget of the step that is being planned, and its load without drafts and replays.
        self._budget, self._load_before = _NO_BUDGET, NO_LOAD
        self._num_waits = 0  # of rows that could have waited for drafts of the drafter
        #: Whether the step that is being planned has no drafts and computes none again. Then the
        #: rest of `plan`, `launch` and `order` is left out, which saves time with tiny models.
        self.is_idle = False
        # How many steps don't ask for drafts, counted from the step that is being planned.
        self._num_to_rest = 0
        self._credit_s = MOST_CREDIT_S  # for asking in vain
        # Number of rows that were asked for this step, and whether one waits for its last token.
        self._num_asked, self._is_awaited = 0, False
        #: Proposer -> the counts of its drafts in steps that have ended.
        self.counts: dict[str, DraftCounts] = {}
        #: The predicted seconds of the steps that accepted drafts saved, minus the seconds of
        #: verifying all drafts and of replays. 0 without a cost model.
        self.saved_s = 0.0

    def begin(self) -> None:
        """Begin to plan a step."""
        if self._num_to_rest:
            self._num_to_rest -= 1
        self.is_idle = self._num_to_rest > 0 and not self._has_states
        if not self.is_idle:
            self._num_asked, self._is_awaited = 0, False
            self._budget, self._load_before = _NO_BUDGET, NO_LOAD

    def awaits(self, sequence: Sequence) -> bool:
        """Whether a running sequence skips this step to wait for the result of a step in flight.

        A sequence waits while its drafts are verified. It also waits for its last token if drafts
        would follow that token, because drafts follow known tokens only, and while a snapshot of
        its state is taken.
        """
        if sequence.draft_token_ids or self._memory.snapshots.awaits(sequence):
            return True
        if sequence.num_pending_tokens != 1 or not self._may_have_drafts(sequence):
            return False
        if self._num_to_rest or self._most_drafts(sequence) < 1:
            return False
        self._num_waits += 1
        is_awaited = self.model is not None and (
            self.model.is_in_use or not self._num_waits % ASKS_EVERY
        )
        if not is_awaited:
            self._num_asked += 1
            is_awaited = len(self.speculator.propose(sequence, 2).token_ids) == 2
        self._is_awaited |= is_awaited
        return is_awaited

    def is_replay(self, sequence: Sequence, num_lacking: int) -> bool:
        """Whether the num_lacking tokens that a running sequence has to compute are its last token,
        and drafts before it that were accepted."""
        if not self._has_states or sequence.is_beam or num_lacking > 1 + self._most:
            return False
        return sequence.num_computed_tokens >= sequence.num_prompt_tokens

    def plan(self, chunks: Mapping[Sequence, int], budget: StepBudget) -> bool:
        """Choose the drafts of the step that is being planned; all its other tokens are planned.

        Sequences get drafts as `choose_lengths` says, as long as there are free blocks; sequences
        of higher rank take these first. Returns False if the step is idle, as `is_idle` says.
        """
        self._budget, self._load_before = budget, budget.load
        if budget.load.num_replay_tokens:
            self._load_before = budget.load._replace(num_replay_tokens=0)
        if self._num_to_rest:
            return True
        model = self.model
        if model is not None and not model.is_considered():
            if not self.speculator.has_proposers:
                return True
            model = None
        least = least_tokens(budget)
        if least < 1:
            rows = self._find_rows(chunks, budget, model)
            # The chances of most guesses are too low to pay, so compute nothing else for them.
            if rows and (model or sum([sum(row.known.survival) for row in rows]) > least):
                self._choose(rows, budget, model)
                if model is not None:
                    model.end_plan(has_ordered=bool(self._ordered))
        if self._planned or self._ordered:
            return True
        self.is_idle = not self._has_states
        if not self._is_awaited:
            asking_s = (1 + self._num_asked) * ASKING_S
            self._credit_s -= asking_s
            if self._credit_s < 0:
                self._credit_s = 0.0
                self._num_to_rest = 1 + _num_rests(budget, asking_s)
        return not self.is_idle

    def _choose(
        self, rows: list[DraftingRow], budget: StepBudget, model: ModelDrafts | None
    ) -> None:
        """Plan the drafts that pay. `rows` are in the order of their ranks. `model` is None if the
        drafter is not considered."""
        # First, choose the numbers of known drafts, or of the drafter's drafts if they gain more.
        options = [
            DraftOption(row.sequence, row.known, None) for row in rows if row.known.token_ids
        ]
        lengths, rate = choose_lengths(candidates_of(options, self._has_states), budget)
        if model is not None:
            others = with_drafter(model, rows, budget)
            if others != options:
                found = candidates_of(others, self._has_states)
                choice = choose_lengths(found, budget, model.costs)
                if choice.rate >= LEAST_GAIN * rate:
                    options, rate = others, choice.rate
                    lengths = with_room(model, others, choice.lengths, budget)
        # Then reserve their slots. A row that has to catch up on too much gets no drafts yet.
        num_drafting = sum([option.catching is not None for option in options])
        for (sequence, proposal, catching), length in zip(options, lengths, strict=True):
            if catching is not None and length and catching.num_now < catching.num_missing:
                self._ordered.append(OrderedDrafts(sequence, cut(proposal, 0), catching.num_now))
                continue
            count = min(length, self._slots.most_after(sequence))
            if count <= 0:
                continue
            self._slots.reserve(sequence, count)
            chosen = cut(proposal, count)
            if catching is not None and model is not None:
                stop = self.speculator.stop(sequence)._replace(
                    least_chance=model.least_chance(budget, rate, num_drafting),
                    end_token_ids=sequence.end_token_ids,
                )
                self._ordered.append(OrderedDrafts(sequence, chosen, catching.num_now, stop))
                continue
            budget.take_drafts(sequence.num_tokens - 1, count)
            sequence.draft_token_ids = chosen.token_ids
            num_lacking = len(sequence.token_ids) - sequence.num_computed_tokens
            self._planned.append((sequence, chosen, num_lacking))

    def _find_rows(
        self, chunks: Mapping[Sequence, int], budget: StepBudget, model: ModelDrafts | None
    ) -> list[DraftingRow]:
        """The decoding rows of the step that may have drafts, by rank."""
        found: list[DraftingRow] = []
        for sequence in self._running_set.running:
            num_lacking = len(sequence.token_ids) - sequence.num_computed_tokens
            decodes = chunks.get(sequence) == num_lacking and (
                num_lacking == 1 or self.is_replay(sequence, num_lacking)
            )
            if not decodes or sequence.num_pending_tokens or not self._may_have_drafts(sequence):
                continue
            most = min(self._most_drafts(sequence), budget.num_tokens)
            if most < 1:
                continue
            self._num_asked += 1
            known = self.speculator.propose(sequence, most)
            if known.token_ids:
                known = cut(known, num_useful(sequence, known.token_ids[:most]))
            expected = NO_PROPOSAL
            if model is not None and not self._would_write_stored(model, sequence):
                expected = model.expect(self.speculator, sequence, most)
            if known.token_ids or expected.survival:
                found.append(DraftingRow(sequence, known, expected))
        return found

    def _would_write_stored(self, model: ModelDrafts, sequence: Sequence) -> bool:
        """Whether the drafter would write to published blocks while tiers may read them."""
        moves = self._memory.moves
        if moves is None or not moves.stores.in_flight:
            return False
        num_reached = len(sequence.token_ids) - model.num_missing(sequence)
        return num_reached < sequence.num_published_blocks * self._memory.block_size

    def order(self, step: StepInFlight) -> tuple[DraftOrder, ...]:
        """The drafts that the drafter must make before a step can run that was launched."""
        if not self._ordered or self.model is None:
            return ()
        ordered: dict[int, OrderedDrafts] = {}
        for each in self._ordered:
            assert each.sequence.row is not None
            ordered[each.sequence.row] = each
        self._launched, step.ordered = step, ordered
        self._ordered.clear()
        return self.model.orders(ordered)

    def add(self, plan: StepPlan, drafts: Drafts) -> StepPlan:
        """Add the drafts that the drafter has made to the plan that was launched last; returns the
        plan with them.

        Drafts are cut where one would end the sequence, where one is not allowed by its grammar,
        and where verifying them does not pay, since the drafter is not sure of them.
        """
        step = self._launched
        assert self.model is not None and step.drafts is not None and plan.step_id == step.step_id
        self.model.learn(step.ordered, drafts)
        # First, choose how many of the drafts are verified.
        options: dict[int, DraftOption] = {}
        for row, each in step.ordered.items():
            drafted = drafts.of_rows[row]
            count = num_useful(each.sequence, drafted.token_ids[: each.num_drafts])
            if count:
                survival = each.stop.survival(drafted.probabilities[:count])
                found = each.expected._replace(
                    token_ids=drafted.token_ids[:count], survival=survival
                )
                options[row] = DraftOption(each.sequence, found, None)
        candidates = candidates_of(list(options.values()), self._has_states)
        lengths = choose_lengths(candidates, self._budget, spent_s=drafts.seconds).lengths
        # Then put them into the plan.
        num_own = {chunk.row: chunk.num_new_tokens for chunk in plan.chunks}
        chunks: dict[int, Chunk] = {}
        for (row, (sequence, found, _)), count in zip(options.items(), lengths, strict=True):
            if not count:
                continue
            chosen = cut(found, count)
            self._budget.take_drafts(len(sequence.token_ids) - 1, count)
            sequence.draft_token_ids = chosen.token_ids
            step.drafts[row] = chosen
            chunks[row] = Chunk(row, num_own.get(row, 1) + count, chosen.token_ids)
            step.num_tokens += count
        step.drafted = drafts.of_rows
        self._record_times(step, drafts.seconds)
        return replace(
            plan,
            num_tokens=step.num_tokens,
            chunks=(*(c for c in plan.chunks if c.row not in chunks), *chunks.values()),
            draft_orders=(),
        )

    def _record_times(self, step: StepInFlight, drafter_s: float) -> None:
        """Record what a step's drafts and replays take, and what a token takes without them."""
        model, load, before = self._budget.model, self._budget.load, self._load_before
        if model is not None and (load != before or drafter_s):
            verify_s = model.predict_s(load) - model.predict_s(before)
            step.drafts_s = verify_s + drafter_s
            step.token_s = model.predict_s(decodes_of(before)) / max(1, before.num_decodes)

    def launch(self, step: StepInFlight) -> tuple[Chunk, ...]:
        """Add the planned drafts to a step that was launched; returns the chunks of their rows."""
        if not (self._planned or self._ordered):
            self._record_times(step, 0.0)  # of replays
            return ()
        chunks: list[Chunk] = []
        drafts: dict[int, Proposal] = {}
        for sequence, proposal, num_lacking in self._planned:
            assert sequence.row is not None
            drafts[sequence.row] = proposal
            num_drafts = len(proposal.token_ids)
            num_new_tokens = num_lacking + num_drafts
            chunks.append(Chunk(sequence.row, num_new_tokens, proposal.token_ids))
            step.num_tokens += num_drafts
        step.drafts = drafts
        self._record_times(step, 0.0)
        self._planned.clear()
        return tuple(chunks)

    def confirm(self, step: StepInFlight, row: int) -> None:
        """Count the accepted drafts of a row as computed and confirmed, and publish their blocks.

        Its sampled tokens were appended. K and V of all but the last are written. In models with
        states, only the tokens before the drafts count. A sequence that was preempted or has ended
        since the step began keeps its tokens only.
        """
        sequence, num_admissions, _ = step.rows[row]
        is_current = sequence.num_admissions == num_admissions
        if sequence.state is SequenceState.RUNNING and is_current:
            num_confirmed = sequence.num_computed_tokens
            if not self._has_states:
                num_confirmed = len(sequence.token_ids) - 1
            sequence.num_computed_tokens = sequence.num_confirmed_tokens = num_confirmed
            if num_confirmed >= (sequence.num_published_blocks + 1) * self._memory.block_size:
                self._memory.publish(sequence, num_confirmed)

    def end(self, step: StepInFlight, result: StepResult) -> None:
        """Confirm the drafts of all rows of a step whose tokens were appended, and learn from
        them."""
        saved_before_s = self.saved_s
        self.saved_s -= step.drafts_s
        if not (step.drafts or step.drafted):
            return
        drafts = step.drafts or {}
        for row, token_ids in zip(result.rows, result.token_ids, strict=True):
            proposal, num_accepted = drafts.get(row), len(token_ids) - 1
            if proposal is not None:
                counts = self.counts.setdefault(proposal.proposer, DraftCounts())
                counts.add(len(proposal.token_ids), num_accepted)
                self.saved_s += num_accepted * step.token_s
                if row not in step.drafted:
                    self.speculator.learn(step.rows[row][0], proposal, num_accepted)
            if row in step.drafted and token_ids:
                self._learn_drafter(step, row, token_ids)
        for row in drafts:
            self.confirm(step, row)
            step.rows[row][0].draft_token_ids = ()
        credit_s = self._credit_s + CREDIT_SHARE * (self.saved_s - saved_before_s)
        self._credit_s = min(max(0.0, credit_s), MOST_CREDIT_S)

    def _learn_drafter(self, step: StepInFlight, row: int, token_ids: Tokens[int]) -> None:
        """Learn from the tokens that a row sampled, for which the drafter has worked."""
        drafted = step.drafted[row]
        if self.model is None or not drafted.token_ids:
            return
        sequence, num_admissions, _ = step.rows[row]
        verified = (step.drafts or {}).get(row, NO_PROPOSAL)
        expected = step.ordered[row].expected
        self.speculator.learn_drafter(
            sequence, expected, drafted, len(verified.token_ids), token_ids
        )
        if verified.token_ids and sequence.num_admissions == num_admissions:
            self.model.confirm(sequence, drafted, len(token_ids) - 1)

    @property
    def num_drafts(self) -> int:
        """Number of drafts that steps verified."""
        return sum([sum(counts.verified) for counts in self.counts.values()])

    @property
    def num_accepted_drafts(self) -> int:
        """Number of drafts that equalled the sampled tokens."""
        return sum([sum(counts.accepted) for counts in self.counts.values()])

    def as_dict(self) -> dict[str, Any]:
        """The counts by proposer, and saved_s."""
        counts = {name: asdict(found) for name, found in self.counts.items()}
        return {"by_proposer": counts, "saved_s": self.saved_s}

    def _most_drafts(self, sequence: Sequence) -> int:
        """Maximum number of drafts for which a decoding sequence has room behind its tokens."""
        return min(
            self._most,
            sequence.max_num_tokens - sequence.num_tokens - 1,
            self._slots.most_after(sequence),
            self._memory.snapshots.most_drafts(sequence, self._most),
        )

    def _may_have_drafts(self, sequence: Sequence) -> bool:
        """Whether drafts may follow the tokens of a decoding sequence.

        A beam search chooses its own tokens, and pooling has none. Waiting forks join a step in
        which the parent decodes one token.
        """
        return not (
            sequence.is_beam
            or sequence.forks
            or sequence.params.pooling is not None
            or len(sequence.token_ids) == sequence.num_prompt_tokens
        )


def _num_rests(budget: StepBudget, asking_s: float) -> int:
    """The number of steps that must not ask, so that asking_s is at most ASKING_SHARE of the time.
    0 if the time of a step is unknown."""
    step_s = budget.predict_s()
    return int(asking_s / (ASKING_SHARE * step_s)) if step_s >= SHORTEST_S else 0
