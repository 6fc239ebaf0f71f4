"""Speculation: plans drafts behind decoding rows, and confirms those that a step accepted.

A proposer guesses the tokens that follow a sequence's known tokens. The step verifies these drafts
(see `core.step`). Drafts change no output, and take nothing from other sequences: they get what is
left of the step's budget and of the free blocks once all other tokens are planned.

A row with drafts counts as a row that decodes one token until its result is applied, and waits for
it: the number of its tokens is unknown before. The result tells which drafts count as computed.
"""

from collections.abc import Mapping
from collections.abc import Sequence as Tokens
from typing import Protocol

from quire.core.memory.kv_cache_manager import KVCacheManager
from quire.core.scheduling.pacing import StepBudget
from quire.core.scheduling.running_set import AppendSlots, RunningSet
from quire.core.scheduling.step_results import StepInFlight
from quire.core.sequence import Sequence, SequenceState
from quire.core.step import Chunk


class Proposer(Protocol):
    """Guesses a sequence's next tokens. The guesses change how fast tokens come, but no token."""

    def propose(self, sequence: Sequence, most: int) -> Tokens[int]:
        """At most `most` tokens of the vocabulary that may follow `sequence.token_ids`; none if
        there is no good guess.

        Called in the planning of steps, so it must be quick. The proposer may read all of the
        sequence, and keep data of its own about it.
        """
        ...


class Drafting:
    """Adds drafts to steps.

    Invariant: `draft_token_ids` of a sequence is not empty if and only if a step in flight, or the
    one that is being planned, verifies these drafts.
    """

    def __init__(
        self,
        proposer: Proposer,
        memory: KVCacheManager,
        running_set: RunningSet,
        slots: AppendSlots,
        most: int,
    ) -> None:
        """most: the largest number of drafts of one sequence in a step."""
        self._proposer = proposer
        self._memory = memory
        self._running_set = running_set
        self._slots = slots
        self._most = most
        self._planned: list[Sequence] = []

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
        return len(self._proposer.propose(sequence, 2)) == 2

    def plan(self, chunks: Mapping[Sequence, int], budget: StepBudget) -> None:
        """Choose the drafts of the step that is being planned; all its other tokens are planned.

        Sequences get drafts by rank, each as many as the budget and the free blocks allow.
        """
        for sequence in self._running_set.running:
            if budget.num_tokens <= 0:
                return
            num_tokens, computed = len(sequence.token_ids), sequence.num_computed_tokens
            decodes = chunks.get(sequence) == 1 and num_tokens - computed == 1
            if not decodes or sequence.num_pending_tokens or not self._may_have_drafts(sequence):
                continue
            num_left = sequence.max_num_tokens - num_tokens - 1
            most = min(self._most, num_left, self._slots.most_after(sequence))
            most = budget.most_drafts(computed, most)
            if most < 1:
                continue
            drafts = _cut(sequence, tuple(self._proposer.propose(sequence, most)[:most]))
            if drafts:
                self._slots.reserve(sequence, len(drafts))
                budget.take_drafts(computed, len(drafts))
                sequence.draft_token_ids = drafts
                self._planned.append(sequence)

    def launch(self, step: StepInFlight) -> tuple[Chunk, ...]:
        """Add the planned drafts to a step that was launched; returns the chunks of their rows."""
        drafts: dict[int, tuple[int, ...]] = {}
        for sequence in self._planned:
            assert sequence.row is not None
            drafts[sequence.row] = sequence.draft_token_ids
        step.drafts = drafts
        step.num_tokens += sum(map(len, drafts.values()))
        self._planned.clear()
        return tuple(
            [Chunk(row, 1 + len(token_ids), token_ids) for row, token_ids in drafts.items()]
        )

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

    def end(self, step: StepInFlight) -> None:
        """Confirm the drafts of all rows of a step whose tokens were appended."""
        for row in step.drafts or ():
            self.confirm(step, row)
            step.rows[row][0].draft_token_ids = ()

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


def _cut(sequence: Sequence, drafts: tuple[int, ...]) -> tuple[int, ...]:
    """The leading drafts that do not end the sequence and that its grammar allows.

    A token that ends the sequence is sampled behind the draft before it, and verifies no further.
    """
    ends = sequence.end_token_ids
    count = next((at for at, token_id in enumerate(drafts) if token_id in ends), len(drafts))
    if sequence.constraint is not None:
        count = sequence.constraint.allowed_prefix(drafts[:count])
    return drafts[:count]
