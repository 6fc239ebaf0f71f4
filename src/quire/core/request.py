"""What enters the engine and what leaves it: token ids in, token ids out."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from quire.core.sampling_params import DecodingParams
from quire.core.step import TokenLogprobs


class FinishReason(str, Enum):
    """Why a sequence ended. STOP and LENGTH are the API's words; the others are ours."""

    STOP = "stop"  # an end token, a stop token or a stop string
    LENGTH = "length"  # max_tokens or max_model_len
    ABORT = "abort"  # the client went away or asked for it
    ERROR = "error"  # its own computation failed; `SequenceOutput.error` says how


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt to continue, n times over.

    priority: smaller goes first (used by the priority policy only).
    cache_domain: requests share cached prefixes only within one domain.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    params: DecodingParams
    n: int = 1
    priority: int = 0
    cache_domain: str = ""


class SequenceOutput(NamedTuple):
    """What a step brought for one sequence (one branch of a request).

    token_ids: the new tokens, an end or stop token included.
    logprobs: one entry per new token, where the request asked for them.
    prompt_logprobs: entries for all prompt tokens but the first, once, with the first new token.
    stop_reason: the client's stop token that ended it; None for the model's own end token.
    num_cached_tokens: prompt tokens served from the prefix cache.
    """

    request_id: str
    branch_index: int
    token_ids: Sequence[int]
    num_cached_tokens: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    logprobs: Sequence[TokenLogprobs] | None = None
    prompt_logprobs: Sequence[TokenLogprobs] | None = None
    error: str | None = None
