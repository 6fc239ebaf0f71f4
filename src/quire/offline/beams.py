"""What a beam search returns to its caller. Called by `llm`."""

from collections.abc import Sequence
from dataclasses import dataclass

from quire.core.sampling_params import BeamSearchParams
from quire.core.scheduling.beams.search import hypothesis_score
from quire.engine_client.results import CompletionOutput, RequestOutput
from quire.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class BeamSearchSequence:
    """One result of a beam search.

    tokens: the prompt's, then the generated ones, an end token included. text: of all of these,
        without special tokens; "" without a tokenizer.
    cum_logprob: the sum over the generated tokens. score: that, divided by their number to the
        power of length_penalty. Both are None where finish_reason is "error".
    finish_reason: "stop" for an end token, "length" for max_tokens or max_model_len, or "error".
    """

    tokens: list[int]
    text: str
    cum_logprob: float | None
    score: float | None
    finish_reason: str | None


@dataclass(frozen=True, slots=True)
class BeamSearchOutput:
    """What became of one prompt.

    sequences: beam_width of them, best first. error: what ended those whose finish_reason is
        "error".
    """

    sequences: list[BeamSearchSequence]
    error: str | None = None


def beam_search_output(
    output: RequestOutput, params: BeamSearchParams, tokenizer: Tokenizer | None
) -> BeamSearchOutput:
    """The result of a request that has ended."""
    return BeamSearchOutput(
        [
            _sequence(output.prompt_token_ids, branch, params, tokenizer)
            for branch in output.outputs
        ],
        output.error,
    )


def _sequence(
    prompt_token_ids: Sequence[int],
    branch: CompletionOutput,
    params: BeamSearchParams,
    tokenizer: Tokenizer | None,
) -> BeamSearchSequence:
    tokens = [*prompt_token_ids, *branch.token_ids]
    score = None
    if branch.cumulative_logprob is not None:
        score = hypothesis_score(
            branch.cumulative_logprob, len(branch.token_ids), params.length_penalty
        )
    return BeamSearchSequence(
        tokens,
        "" if tokenizer is None else tokenizer.decode(tokens),
        branch.cumulative_logprob,
        score,
        branch.finish_reason,
    )
