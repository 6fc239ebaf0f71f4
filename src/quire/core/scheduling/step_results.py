"""Steps in flight, and the outputs made from their results.

`scheduler` uses all of this module; beam search uses only `failure`.
"""

from collections import deque
from collections.abc import Mapping
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field
from itertools import chain

from quire.core.memory.kv_cache_manager import KVCacheManager
from quire.core.request import FinishReason, SequenceOutput
from quire.core.scheduling.model_drafts import OrderedDrafts
from quire.core.scheduling.plain_rows import NO_PLAIN_ROWS, PlainRows
from quire.core.scheduling.proposals import Proposal
from quire.core.scheduling.running_set import rank_of
from quire.core.sequence import Sequence, SequenceState
from quire.core.step import Drafted, StepResult, TokenLogprobs


@dataclass(slots=True)
class StepInFlight:
    """A launched step, recorded until `Scheduler.apply` gets its result."""

    step_id: int
    #: `RunningSet.num_released` at its launch.
    num_released: int = 0
    plain: PlainRows = NO_PLAIN_ROWS
    #: The other rows that compute: row -> (its sequence, the sequence's num_admissions at that
    #: time, tokens written when the step has ended).
    rows: dict[int, tuple[Sequence, int, int]] = field(default_factory=dict)
    #: Row -> the drafts that the step verifies after the row's tokens; None if no row has drafts.
    drafts: dict[int, Proposal] | None = None
    #: Row -> the drafts that are ordered from the runner's drafter.
    ordered: Mapping[int, OrderedDrafts] = field(default_factory=dict)
    #: Row -> the work of the runner's drafter for the step.
    drafted: Mapping[int, Drafted] = field(default_factory=dict)
    #: The predicted seconds of the drafts, and those of a token without drafts.
    drafts_s: float = 0.0
    token_s: float = 0.0
    num_tokens: int = 0
    #: Number of rows that close their gap: the result must have a token for each.
    num_sampling: int = 0

    @property
    def sequences(self) -> list[Sequence]:
        """The sequences of all rows that compute."""
        return [*self.plain.sequences, *(entry[0] for entry in self.rows.values())]

    def split(self, result: StepResult, num_released: int) -> list[Tokens[int]]:
        """Move the plain rows for which this result does more than append a token to `rows`: those
        that failed or end, or whose sequence has lost its row since the launch. Returns the tokens
        of the rows that stay plain.

        num_released: `RunningSet.num_released` now.
        """
        # Nearly always no plain row ends, and often there are no others.
        plain = self.plain
        may_end = not plain.all_end_token_ids.isdisjoint(chain.from_iterable(result.token_ids))
        if result.rows == plain.rows and not may_end and num_released == self.num_released:
            return list(result.token_ids)
        unplain = set(result.failed)
        token_ids = dict(zip(result.rows, result.token_ids, strict=True))
        if num_released != self.num_released:
            each = zip(plain.rows, plain.sequences, plain.nums_admissions, strict=True)
            for row, sequence, num_admissions in each:
                if sequence.row is None or sequence.num_admissions != num_admissions:
                    unplain.add(row)
        if may_end:
            for row, end_token_ids in zip(plain.rows, plain.end_token_ids, strict=True):
                if not end_token_ids.isdisjoint(token_ids.get(row, ())):
                    unplain.add(row)
        if unplain:
            gone: list[Sequence] = []
            for row, sequence, known, num_admissions, *_ in zip(*plain[:-1], strict=True):
                if row in unplain:  # the step has computed all tokens that are known now
                    gone.append(sequence)
                    self.rows[row] = sequence, num_admissions, len(known)
            self.plain = plain = plain.changed(gone, ())
        return list(map(token_ids.__getitem__, plain.rows))

    def confirm(
        self, result: StepResult, plain_tokens: Tokens[Tokens[int]], memory: KVCacheManager
    ) -> None:
        """Append the tokens of plain rows, whose counts are changed already, publish the blocks
        that the step filled, and keep the log-probabilities of prompts.

        Leaves out rows with drafts: only their sampled tokens show how many drafts are confirmed.
        """
        for row, prompt_logprobs in result.prompt_logprobs.items():
            sequence, num_admissions, _ = self.rows[row]
            is_current = sequence.num_admissions == num_admissions and row not in result.failed
            # A sequence that was preempted in its prompt computes these positions again.
            is_kept = sequence.state is not SequenceState.PREEMPTED or sequence.num_pending_tokens
            if is_current and is_kept and sequence.needs_prompt_logprobs:
                sequence.prompt_logprobs.extend(prompt_logprobs)
        # A plain row's step has computed all tokens that were known before.
        block_size, running = memory.block_size, SequenceState.RUNNING
        plain = self.plain
        filled = [
            sequence
            for sequence, count in zip(plain.sequences, map(len, plain.token_ids), strict=True)
            if not count % block_size
        ]
        deque(map(list.extend, plain.token_ids, plain_tokens), maxlen=0)
        # A sequence that was preempted since the step began must not publish blocks again.
        left_out = {*result.failed, *self.drafts} if self.drafts else result.failed
        for row, (sequence, num_admissions, num_confirmed) in self.rows.items():
            if (
                sequence.state is not running
                or sequence.num_admissions != num_admissions
                or row in left_out
            ):
                continue
            sequence.num_confirmed_tokens = num_confirmed
            if num_confirmed >= (sequence.num_published_blocks + 1) * block_size:
                filled.append(sequence)
        if filled:
            filled.sort(key=rank_of)  # the first-ranked of blocks with equal contents is published
            memory.filled_blocks.publish(filled)


def extend(
    sequence: Sequence, token_ids: Tokens[int], logprobs: Tokens[TokenLogprobs] | None
) -> SequenceOutput:
    """Append the sampled tokens, up to a token that ends the sequence. Returns the output."""
    params, constraint = sequence.params, sequence.constraint
    prompt_logprobs = None
    if params.prompt_logprobs is not None and sequence.num_output_tokens == 0:
        prompt_logprobs = tuple(sequence.prompt_logprobs)
    for num_taken, token_id in enumerate(token_ids, 1):
        if sequence.append(token_id):
            token_ids = token_ids[:num_taken]
            break
    stop_reason = None
    if constraint is not None and constraint.error is not None:
        # The last token is not allowed. Tokens before it were sampled by the same step, as drafts.
        return failure(sequence, constraint.error)._replace(
            token_ids=token_ids[:-1],
            logprobs=None if logprobs is None else logprobs[: len(token_ids) - 1],
        )
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
        ends_with_text=(
            constraint is not None and constraint.ends_with_text and stop_reason is None
        ),
    )


def pooled_output(sequence: Sequence, pooled: bytes) -> SequenceOutput:
    """End a pooling sequence. Returns its only output."""
    sequence.finish_reason = FinishReason.STOP
    return SequenceOutput(
        sequence.request_id,
        sequence.branch_index,
        (),
        sequence.num_cached_tokens,
        FinishReason.STOP,
        pooled=pooled,
    )


def failure(sequence: Sequence, message: str, branch_index: int | None = None) -> SequenceOutput:
    """The output that reports that a sequence has ended with an error, `message`.

    branch_index: the branch of the request that the output is for. Only beam search passes it; None
        means the sequence's own branch.
    """
    return SequenceOutput(
        sequence.request_id,
        sequence.branch_index if branch_index is None else branch_index,
        (),
        sequence.num_cached_tokens,
        FinishReason.ERROR,
        error=message,
    )
