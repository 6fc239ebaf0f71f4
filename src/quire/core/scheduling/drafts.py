"""Speculation: plans drafts behind decoding rows, and confirms those that a step accepted.

A proposer guesses the tokens that follow a sequence's known tokens. The step verifies these drafts
(see `core.step`). Drafts change no output, and take nothing from other sequences: they get what is
left of the step's budget and of the free blocks once all other tokens are planned.

A row with drafts counts as a row that decodes one token until its result is applied, and waits for
it: the number of its tokens is unknown before. The result tells which drafts count as computed.
"""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from quire.core.memory.kv_cache_manager import KVCacheManager
from quire.core.scheduling.draft_lengths import (
    DraftCandidate,
    choose_lengths,
    decodes_of,
    is_worth_drafts,
)
from quire.core.scheduling.pacing import StepBudget
from quire.core.scheduling.proposals import DraftCounts, Proposal, Speculator
from quire.core.scheduling.running_set import AppendSlots, RunningSet
from quire.core.scheduling.step_results import StepInFlight
from quire.core.sequence import Sequence, SequenceState
from quire.core.step import Chunk, StepResult

LEAST_CROWD, MAX_SKIPPED = 4, 7
"""If no draft of a step pays among this number of rows or more, 1, 3, and then MAX_SKIPPED steps
follow without asking for drafts: asking takes time for each row, and a crowd rarely has use for
them."""


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
    ) -> None:
        """most: the largest number of drafts of one sequence in a step."""
        self.speculator = speculator
        self._memory = memory
        self._running_set = running_set
        self._slots = slots
        self._most = most
        self._planned: list[tuple[Sequence, Proposal]] = []
        # The number of steps that are still planned without asking for drafts, and that were the
        # last time.
        self._num_to_skip = self._num_skipped = 0
        self._planned_s = (0.0, 0.0)
        #: Proposer -> the counts of its drafts in steps that have ended.
        self.counts: dict[str, DraftCounts] = {}
        #: The predicted seconds of the steps that accepted drafts made needless, less those of
        #: verifying all drafts. 0 without a cost model.
        self.saved_s = 0.0

    def awaits(self, sequence: Sequence) -> bool:
        """Whether a running sequence skips this step to wait for the result of a step in flight.

        A sequence waits while its drafts are verified. It also waits for its last token if drafts
        would follow that token, because drafts follow known tokens only.
        """
        if sequence.draft_token_ids:
            return True
        if sequence.num_pending_tokens != 1 or not self._may_have_drafts(sequence):
            return False
        if (
            sequence.num_tokens + 2 > sequence.max_num_tokens
            or self._slots.most_after(sequence) < 1
        ):
            return False
        return len(self.speculator.propose(sequence, 2).token_ids) == 2

    def plan(self, chunks: Mapping[Sequence, int], budget: StepBudget) -> None:
        """Choose the drafts of the step that is being planned; all its other tokens are planned.

        Sequences get drafts as `choose_lengths` says, as long as there are free blocks; sequences
        of higher rank take these first.
        """
        if self._num_to_skip:
            self._num_to_skip -= 1
            return
        found = self._find_proposals(chunks, budget) if is_worth_drafts(budget) else []
        self._choose(found, budget)
        if self._planned or len(chunks) < LEAST_CROWD:
            self._num_skipped = 0
        else:
            self._num_to_skip = self._num_skipped = min(2 * self._num_skipped + 1, MAX_SKIPPED)

    def _choose(self, found: list[tuple[Sequence, Proposal]], budget: StepBudget) -> None:
        """Plan the drafts that pay. `found` has proposals by rank."""
        candidates = [
            DraftCandidate(sequence.num_computed_tokens, proposal.survival)
            for sequence, proposal in found
        ]
        lengths = choose_lengths(candidates, budget)
        before, model = budget.load, budget.model
        for (sequence, proposal), length in zip(found, lengths, strict=True):
            count = min(length, self._slots.most_after(sequence))
            if count > 0:
                self._slots.reserve(sequence, count)
                budget.take_drafts(sequence.num_computed_tokens, count)
                chosen = _cut(proposal, count)
                sequence.draft_token_ids = chosen.token_ids
                self._planned.append((sequence, chosen))
        if model is not None and self._planned:
            self._planned_s = (
                model.predict_s(budget.load) - model.predict_s(before),
                model.predict_s(decodes_of(before)) / max(1, before.num_decodes),
            )

    def _find_proposals(
        self, chunks: Mapping[Sequence, int], budget: StepBudget
    ) -> list[tuple[Sequence, Proposal]]:
        """The proposals for the decoding rows of the step, by rank."""
        found: list[tuple[Sequence, Proposal]] = []
        for sequence in self._running_set.running:
            num_tokens, computed = len(sequence.token_ids), sequence.num_computed_tokens
            decodes = chunks.get(sequence) == 1 and num_tokens - computed == 1
            if not decodes or sequence.num_pending_tokens or not self._may_have_drafts(sequence):
                continue
            num_left = sequence.max_num_tokens - num_tokens - 1
            most = min(self._most, num_left, budget.num_tokens, self._slots.most_after(sequence))
            if most < 1:
                continue
            proposal = self.speculator.propose(sequence, most)
            count = _num_useful(sequence, proposal.token_ids[:most])
            if count:
                found.append((sequence, _cut(proposal, count)))
        return found

    def launch(self, step: StepInFlight) -> tuple[Chunk, ...]:
        """Add the planned drafts to a step that was launched; returns the chunks of their rows."""
        chunks: list[Chunk] = []
        drafts: dict[int, Proposal] = {}
        for sequence, proposal in self._planned:
            assert sequence.row is not None
            drafts[sequence.row] = proposal
            num_new_tokens = 1 + len(proposal.token_ids)
            chunks.append(Chunk(sequence.row, num_new_tokens, proposal.token_ids))
            step.num_tokens += num_new_tokens - 1
        step.drafts = drafts
        step.drafts_s, step.token_s = self._planned_s
        self._planned.clear()
        return tuple(chunks)

    def confirm(self, step: StepInFlight, row: int) -> None:
        """Count the accepted drafts of a row as computed and confirmed, and publish their blocks.

        Its sampled tokens were appended. K and V of all but the last are written. A sequence that
        was preempted or has ended since the step began keeps its tokens only.
        """
        sequence, num_admissions, _ = step.rows[row]
        is_current = sequence.num_admissions == num_admissions
        if sequence.state is SequenceState.RUNNING and is_current:
            num_confirmed = len(sequence.token_ids) - 1
            sequence.num_computed_tokens = sequence.num_confirmed_tokens = num_confirmed
            if num_confirmed >= (sequence.num_published_blocks + 1) * self._memory.block_size:
                self._memory.publish(sequence, num_confirmed)

    def end(self, step: StepInFlight, result: StepResult) -> None:
        """Confirm the drafts of all rows of a step whose tokens were appended, and learn from
        them."""
        if not step.drafts:
            return
        self.saved_s -= step.drafts_s
        for row, token_ids in zip(result.rows, result.token_ids, strict=True):
            proposal = step.drafts.get(row)
            if proposal is not None:
                num_verified, num_accepted = len(proposal.token_ids), len(token_ids) - 1
                counts = self.counts.setdefault(proposal.proposer, DraftCounts())
                counts.add(num_verified, num_accepted)
                self.saved_s += num_accepted * step.token_s
                self.speculator.learn(step.rows[row][0], proposal, num_accepted)
        for row in step.drafts:
            self.confirm(step, row)
            step.rows[row][0].draft_token_ids = ()

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


def _cut(proposal: Proposal, count: int) -> Proposal:
    """The proposal's first `count` tokens."""
    if count == len(proposal.token_ids):
        return proposal
    return proposal._replace(
        token_ids=proposal.token_ids[:count], survival=proposal.survival[:count]
    )


def _num_useful(sequence: Sequence, drafts: tuple[int, ...]) -> int:
    """The number of leading drafts that do not end the sequence and that its grammar allows.

    A token that ends the sequence is sampled behind the draft before it, and verifies no further.
    """
    ends = sequence.end_token_ids
    count = next((at for at, token_id in enumerate(drafts) if token_id in ends), len(drafts))
    if sequence.constraint is not None:
        count = sequence.constraint.allowed_prefix(drafts[:count])
    return count
