"""Requests that enter the engine, and outputs that leave it, in token ids."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from operator import countOf
from typing import NamedTuple

from quire.core.adapters import AdapterRef
from quire.core.content_spans import Content, ContentSpan
from quire.core.sampling_params import DecodingParams, ModelLimits
from quire.core.step import TokenLogprobs
from quire.errors import InvalidRequestError, PromptTooLongError


class FinishReason(StrEnum):
    """Why a sequence ended. STOP and LENGTH are OpenAI's reasons, the others quire's own."""

    STOP = "stop"  # an end token, a stop token or a stop string
    LENGTH = "length"  # max_tokens or max_model_len
    ABORT = "abort"  # the client disconnected or cancelled
    ERROR = "error"  # its own computation failed; `SequenceOutput.error` has the message


class ResumedBranch(NamedTuple):
    """A branch that continues from its earlier output after its engine's process died."""

    branch_index: int
    #: The branch's output so far, without an end token.
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt and how to continue it."""

    request_id: str
    prompt_token_ids: Sequence[int]
    params: DecodingParams
    #: Number of continuations. For a beam search, the beam width; each beam gives one output.
    n: int = 1
    #: Smaller goes first. Only the priority policy reads it.
    priority: int = 0
    #: Requests share cached prefixes only within one domain; prefixes that an operator published
    #: are shared by all domains.
    cache_domain: str = ""
    #: Owner of the request, for fair sharing and the memory report.
    tenant: str = ""
    #: Seconds after arrival by which the request should have ended. Only the deadline policy reads
    #: it; None means no deadline.
    deadline_s: float | None = None
    #: After a crash, the branches that have not ended; only these are continued. Empty: the request
    #: starts new, with n branches.
    resumed: tuple[ResumedBranch, ...] = ()
    #: Adapter that computes all tokens; None means the base model.
    adapter: AdapterRef | None = None
    #: Spans of the prompt that stand for contents, such as images, in ascending order. Their
    #: positions have placeholder ids in prompt_token_ids.
    content_spans: tuple[ContentSpan, ...] = ()
    #: The contents that content_spans name, each once.
    contents: tuple[Content, ...] = ()
    #: Tokens that the client expects to get, for drafts; at most max_model_len. They change no
    #: output.
    prediction_token_ids: tuple[int, ...] = ()
    #: Whether drafts are taken from earlier answers of its cache domain, and its own answer is kept
    #: for drafts of later requests. It changes no output.
    speculation_history: bool = True

    def resume(
        self, branches: Mapping[int, Sequence[int]], *, has_output: bool, elapsed_s: float
    ) -> "Request":
        """Return the request for the output that is still missing after this request was cut off.

        branches: for each branch that has not ended, the tokens that the client already has.
        has_output: whether any branch, ended ones included, has returned a token. If so, the
        prompt's log-probabilities came with the first token and are not sent again. elapsed_s:
        seconds since the request's arrival.

        A beam search starts over, since it returns no output before its end.
        """
        again = self
        if self.deadline_s is not None:
            again = replace(again, deadline_s=max(0.0, self.deadline_s - elapsed_s))
        if self.params.beam_width or (not has_output and len(branches) == self.n):
            return again
        params = replace(self.params, prompt_logprobs=None) if has_output else self.params
        resumed = tuple(ResumedBranch(index, tuple(ids)) for index, ids in branches.items())
        return replace(again, params=params, resumed=resumed)


class PhaseTimes(NamedTuple):
    """How long the phases of a sequence took in the engine, in seconds."""

    #: From the request's arrival to its first step.
    queue_s: float
    #: From the first step to the first token.
    prefill_s: float
    #: From the first token of the sequence to its last token so far.
    decode_s: float


class SequenceOutput(NamedTuple):
    """The output of one step for one sequence, that is, one branch of a request."""

    request_id: str
    branch_index: int
    #: The new tokens, including an end or stop token.
    token_ids: Sequence[int]
    #: Number of prompt tokens served from the prefix cache.
    num_cached_tokens: int = 0
    finish_reason: FinishReason | None = None
    #: The client's stop token that ended the sequence; None for the model's own end token.
    stop_reason: int | None = None
    #: One entry for each new token, if the request asked for them.
    logprobs: Sequence[TokenLogprobs] | None = None
    #: Entries for all prompt tokens but the first, sent once with the first new token. Between two
    #: processes they are packed as bytes by `engine_client.logprob_entries`.
    prompt_logprobs: Sequence[TokenLogprobs] | bytes | None = None
    error: str | None = None
    #: Sum of the log-probabilities of all tokens of a finished beam; None for other sequences.
    cumulative_logprob: float | None = None
    #: The result of a pooling request, as fp32 in the machine's byte order; sent at its end,
    #: without any token.
    pooled: bytes | None = None
    #: Whether the last token completed the grammar and is part of the answer, not an end token.
    ends_with_text: bool = False
    #: Set with the request's first token, and at the sequence's end; None for a beam search.
    phases: PhaseTimes | None = None


def prompt_too_long(
    num_tokens: int, max_model_len: int, *, generates: bool = True
) -> PromptTooLongError:
    """The error for a prompt that exceeds max_model_len, counting one generated token if
    `generates`."""
    if not generates:
        return PromptTooLongError(
            f"the input has {num_tokens} tokens, above max_model_len, {max_model_len}; shorten it,"
            " or let truncate_prompt_tokens cut it",
            "prompt",
        )
    return PromptTooLongError(
        f"the prompt has {num_tokens} tokens, but max_model_len is {max_model_len} and at least one"
        " token must be left to generate; shorten the prompt",
        "prompt",
    )


def check_prompt(
    prompt_token_ids: Sequence[int], limits: ModelLimits, *, generates: bool = True
) -> None:
    """Raise InvalidRequestError for token ids that the model can't process, and PromptTooLongError
    for a prompt that exceeds max_model_len, counting one generated token if `generates`."""
    if not prompt_token_ids:
        raise InvalidRequestError("the prompt is empty; give at least one token", "prompt")
    # The length comes first, so that millions of ids are refused without reading each.
    if len(prompt_token_ids) + generates > limits.max_model_len:
        raise prompt_too_long(len(prompt_token_ids), limits.max_model_len, generates=generates)
    # The loop takes five times as long as this count, so it only runs to name the wrong type.
    if countOf(map(type, prompt_token_ids), int) != len(prompt_token_ids):
        _check_whole_numbers(prompt_token_ids)
    low, high = min(prompt_token_ids), max(prompt_token_ids)
    most = limits.vocab_size if generates else limits.num_token_ids
    if low < 0 or high >= most:
        raise InvalidRequestError(
            f"the prompt contains token id {low if low < 0 else high}, but the vocabulary has"
            f" {limits.vocab_size} tokens (0 to {limits.vocab_size - 1})",
            "prompt",
        )


def check_pooling(request: Request, limits: ModelLimits) -> None:
    """Raise InvalidRequestError if the model does not serve this kind of request (generate or
    pool)."""
    pooling = request.params.pooling
    if pooling is None:
        if not limits.generates:
            raise InvalidRequestError(NO_GENERATION)
    elif request.n > 1 or request.params.beam_width or request.resumed:
        raise InvalidRequestError("a pooling request must have n = 1 and no beam search", "n")


NO_GENERATION = (
    "this model generates no text: it embeds and scores (/v1/embeddings, /score, /rerank;"
    " LLM.embed, LLM.score)"
)


def _check_whole_numbers(token_ids: Sequence[int]) -> None:
    for token_id in token_ids:
        if isinstance(token_id, bool) or not isinstance(token_id, int):
            raise InvalidRequestError(
                f"the prompt contains {token_id!r}, but token ids are whole numbers", "prompt"
            )


def check_prediction(token_ids: Sequence[int], limits: ModelLimits) -> None:
    """Raise InvalidRequestError for predicted tokens that can't be drafts, or are too many."""
    if not token_ids:
        return
    if len(token_ids) > limits.max_model_len:
        raise InvalidRequestError(
            f"the prediction has {len(token_ids)} tokens, above max_model_len,"
            f" {limits.max_model_len}; shorten it",
            "prediction",
        )
    wrong = [each for each in (min(token_ids), max(token_ids)) if not 0 <= each < limits.vocab_size]
    if wrong:
        raise InvalidRequestError(
            f"the prediction contains token id {wrong[0]}, but the vocabulary has"
            f" {limits.vocab_size} tokens (0 to {limits.vocab_size - 1})",
            "prediction",
        )


def check_resumed(request: Request, limits: ModelLimits) -> None:
    """Raise InvalidRequestError for branches in `request.resumed` that can't continue."""
    if not request.resumed:
        return
    if request.params.beam_width:
        raise InvalidRequestError("a beam search can't be resumed; start it again", "resumed")
    indices = {branch.branch_index for branch in request.resumed}
    if len(indices) < len(request.resumed) or not indices <= set(range(request.n)):
        given = [branch.branch_index for branch in request.resumed]
        raise InvalidRequestError(
            f"the resumed branches are {given}, but must be some of the {request.n}, each once",
            "resumed",
        )
    num_prompt_tokens = len(request.prompt_token_ids)
    longest = min(request.params.max_tokens, limits.max_model_len - num_prompt_tokens)
    for branch in request.resumed:
        if len(branch.token_ids) >= longest:
            raise InvalidRequestError(
                f"branch {branch.branch_index} is to be resumed after {len(branch.token_ids)}"
                f" tokens, but ends with {longest} at the latest",
                "resumed",
            )
        if branch.token_ids:
            check_prompt(branch.token_ids, limits)
