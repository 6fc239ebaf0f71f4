"""What a step sampled -> what a sequence's client gets."""

from collections.abc import Sequence as Tokens

from quire.core.request import FinishReason, SequenceOutput
from quire.core.sequence import Sequence
from quire.core.step import TokenLogprobs


def extend(
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
    else:
        if logprobs is None and prompt_logprobs is None:  # nearly all there are
            return SequenceOutput(
                sequence.request_id, sequence.branch_index, token_ids, sequence.num_cached_tokens
            )
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


def failure(sequence: Sequence, message: str, branch_index: int | None = None) -> SequenceOutput:
    """The output of a sequence that ends with an error; branch_index: of a beam, else its own."""
    return SequenceOutput(
        sequence.request_id,
        sequence.branch_index if branch_index is None else branch_index,
        (),
        sequence.num_cached_tokens,
        FinishReason.ERROR,
        error=message,
    )
