"""Steps in flight, and the outputs made from their results.

`scheduler` uses all of this module; beam search uses only `failure`.
"""

from collections.abc import Mapping
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field

from quire.core.memory.kv_cache_manager import KVCacheManager
from quire.core.request import FinishReason, SequenceOutput
from quire.core.scheduling.model_drafts import OrderedDrafts
from quire.core.scheduling.proposals import Proposal
from quire.core.sequence import Sequence, SequenceState
from quire.core.step import Drafted, StepResult, TokenLogprobs

OTHER_FIELDS = tuple(SequenceOutput._field_defaults.values())[1:]
"""The fields of an output behind `num_cached_tokens`, of a sequence that goes on."""

new_output = tuple.__new__
"""new_output(SequenceOutput, fields) takes 65% of the time of the constructor."""


@dataclass(slots=True)
class StepInFlight:
    """A launched step, recorded until `Scheduler.apply` gets its result."""

    step_id: int
    #: Row -> (its sequence, the sequence's num_admissions at that time, tokens written when the
    #: step has ended).
    rows: dict[int, tuple[Sequence, int, int]] = field(default_factory=dict)
    #: The rows that sample and whose sequences may do more with a token than append it, even if it
    #: is no end token; without those of `drafts`, and those that get log-probabilities.
    events: set[int] = field(default_factory=set)
    #: Row -> the drafts that the step verifies behind the row's tokens; None if it has none.
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

    def apply_result(self, result: StepResult, memory: KVCacheManager) -> None:
        """Publish the blocks that the step filled, and keep the log-probabilities of prompts.

        Leaves out rows with drafts, of which only the sampled tokens say how many are confirmed.
        """
        for row, prompt_logprobs in result.prompt_logprobs.items():
            sequence, num_admissions, _ = self.rows[row]
            is_current = sequence.num_admissions == num_admissions and row not in result.failed
            # A sequence that was preempted in its prompt computes these positions again.
            is_kept = sequence.state is not SequenceState.PREEMPTED or sequence.num_pending_tokens
            if is_current and is_kept and sequence.needs_prompt_logprobs:
                sequence.prompt_logprobs.extend(prompt_logprobs)
        # A sequence that was preempted since the step began must not publish blocks again.
        block_size, running = memory.block_size, SequenceState.RUNNING
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
                memory.publish(sequence, num_confirmed)


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
