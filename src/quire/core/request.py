"""Requests that enter the engine, and outputs that leave it, in token ids."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from operator import countOf
from typing import NamedTuple

from quire.core.adapters import AdapterRef
from quire.core.sampling_params import DecodingParams, ModelLimits
from quire.core.step import TokenLogprobs
from quire.errors import InvalidRequestError, PromptTooLongError


class FinishReason(StrEnum):
    """Why a sequence ended. STOP and LENGTH are the API's words; the others are ours."""

    STOP = "stop"  # an end token, a stop token or a stop string
    LENGTH = "length"  # max_tokens or max_model_len
    ABORT = "abort"  # the client went away or asked for it
    ERROR = "error"  # its own computation failed; `SequenceOutput.error` says how


class ResumedBranch(NamedTuple):
    """A branch that goes on from what it generated before, in an engine that is no more.

    token_ids: its output so far, without an end.
    """

    branch_index: int
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt to continue, n times over (with beams: n is the beam width, one output each).

    priority: smaller goes first (used by the priority policy only).
    cache_domain: requests share cached prefixes only within one domain, and with what an operator
        published for all.
    tenant: whose request it is, for fair sharing and the ledger.
    deadline_s: seconds after its arrival by which it should have ended (deadline policy only).
    resumed: where it goes on after a crash: the branches that have not ended, and none else, get
        what would have followed. Empty: it begins, with n branches.
    adapter: what all of its tokens are computed with; None: the base model.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    params: DecodingParams
    n: int = 1
    priority: int = 0
    cache_domain: str = ""
    tenant: str = ""
    deadline_s: float | None = None
    resumed: tuple[ResumedBranch, ...] = ()
    adapter: AdapterRef | None = None

    def resume(
        self, branches: Mapping[int, Sequence[int]], *, has_output: bool, elapsed_s: float
    ) -> "Request":
        """The request that brings what is still missing of this one, which was cut off.

        branches: of those that have not ended, the tokens that their client has. has_output:
        whether any branch, ended ones included, brought a token: with the first came the
        log-probabilities of the prompt, and they don't come again. elapsed_s: since its arrival.

        A beam search brings everything with its end: it begins anew.
        """
        again = self
        if self.deadline_s is not None:
            again = replace(again, deadline_s=max(0.0, self.deadline_s - elapsed_s))
        if self.params.beam_width or (not has_output and len(branches) == self.n):
            return again
        params = replace(self.params, prompt_logprobs=None) if has_output else self.params
        resumed = tuple(ResumedBranch(index, tuple(ids)) for index, ids in branches.items())
        return replace(again, params=params, resumed=resumed)


class SequenceOutput(NamedTuple):
    """What a step brought for one sequence (one branch of a request).

    token_ids: the new tokens, an end or stop token included.
    logprobs: one entry per new token, where the request asked for them.
    prompt_logprobs: entries for all prompt tokens but the first, once, with the first new token; on
        their way between two processes as `engine.logprob_entries` packs them.
    stop_reason: the client's stop token that ended it; None for the model's own end token.
    num_cached_tokens: prompt tokens served from the prefix cache.
    cumulative_logprob: of all its tokens; for a beam, which comes whole, with its end.
    pooled: the result of a request that pools, as fp32 in the machine's order; with its end, and
        without any token.
    ends_with_text: it stopped because its grammar ended with the last token, which is no end token
        but part of the answer.
    """

    request_id: str
    branch_index: int
    token_ids: Sequence[int]
    num_cached_tokens: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    logprobs: Sequence[TokenLogprobs] | None = None
    prompt_logprobs: Sequence[TokenLogprobs] | bytes | None = None
    error: str | None = None
    cumulative_logprob: float | None = None
    pooled: bytes | None = None
    ends_with_text: bool = False


def prompt_too_long(
    num_tokens: int, max_model_len: int, *, generates: bool = True
) -> PromptTooLongError:
    """The error for a prompt that leaves no room for one more token, if it generates any."""
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
    """Raise InvalidRequestError for token ids that the model can't be given, and
    PromptTooLongError where they leave no room for one more, if the request generates any."""
    if not prompt_token_ids:
        raise InvalidRequestError("the prompt is empty; give at least one token", "prompt")
    # First, so that millions of ids are refused without a look at each.
    if len(prompt_token_ids) + generates > limits.max_model_len:
        raise prompt_too_long(len(prompt_token_ids), limits.max_model_len, generates=generates)
    # The loop runs only where a type is odd: it takes five times as long as this count.
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
    """Raise InvalidRequestError for a request whose kind the model does not serve."""
    pooling = request.params.pooling
    if pooling is None:
        if not limits.generates:
            raise InvalidRequestError(NO_GENERATION)
    elif request.n > 1 or request.params.beam_width or request.resumed:
        raise InvalidRequestError("a prompt is pooled once: n is 1, without beams", "n")


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


def check_resumed(request: Request, limits: ModelLimits) -> None:
    """Raise InvalidRequestError for branches that can't go on as `request.resumed` says."""
    if not request.resumed:
        return
    if request.params.beam_width:
        raise InvalidRequestError("a beam search is not resumed; begin it anew", "resumed")
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
