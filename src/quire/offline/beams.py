"""The results of a beam search, as `LLM.beam_search` returns them."""

from collections.abc import Sequence
from dataclasses import dataclass

from quire.core.sampling_params import BeamSearchParams
from quire.core.scheduling.beams.search import hypothesis_score
from quire.engine_client.results import CompletionOutput, RequestOutput
from quire.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class BeamSearchSequence:
    """One result of a beam search."""

    #: The prompt's tokens, then the generated ones, including an end token.
    tokens: list[int]
    #: The text of all tokens, without special tokens; "" without a tokenizer.
    text: str
    #: The sum of log-probabilities over the generated tokens; None if finish_reason is "error".
    cum_logprob: float | None
    #: cum_logprob divided by the number of generated tokens to the power of length_penalty; None if
    #: finish_reason is "error".
    score: float | None
    #: "stop" for an end token, "length" for max_tokens or max_model_len, or "error".
    finish_reason: str | None


@dataclass(frozen=True, slots=True)
class BeamSearchOutput:
    """The result of one prompt."""

    #: The best beam_width sequences, best first.
    sequences: list[BeamSearchSequence]
    #: The message of the failure if sequences have the finish_reason "error"; None otherwise.
    error: str | None = None


def beam_search_output(
    output: RequestOutput, params: BeamSearchParams, tokenizer: Tokenizer | None
) -> BeamSearchOutput:
    """The beam search result of a request that has ended."""
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
