"""Results of a request for the caller: whole results and deltas.

Plain data, made by `outputs`.
"""

from dataclasses import dataclass, field
from typing import NoReturn

from quire.compat.refusals import EXPERT_CHOICES, TEXT_ONLY, TRANSFER
from quire.core.adapters import LoRARequest
from quire.engine_client.logprob_entries import LogprobEntries
from quire.errors import unknown_name

_ADVICE = {
    "encoder_prompt": "no model here has an encoder beside its decoder",
    "encoder_prompt_token_ids": "no model here has an encoder beside its decoder",
    "kv_transfer_params": TRANSFER,
    "multi_modal_placeholders": TEXT_ONLY,
    "routed_experts": EXPERT_CHOICES,
}


@dataclass(frozen=True, slots=True)
class Logprob:
    """The log-probability of one token at one position."""

    logprob: float
    #: 1 is the most likely token of the vocabulary; None if unknown.
    rank: int | None = None
    decoded_token: str | None = None


class Truth(int):
    """A bool that may also be called, since vLLM has methods where quire has attributes."""

    __slots__ = ()

    def __call__(self) -> bool:
        return bool(self)

    def __repr__(self) -> str:
        return repr(bool(self))


@dataclass(slots=True)
class CompletionOutput:
    """The result of one branch of a request."""

    index: int
    text: str = ""
    #: The generated tokens, including an end token.
    token_ids: list[int] = field(default_factory=list)
    #: The sum of the tokens' log-probabilities; None unless logprobs were requested or this is a
    #: beam search.
    cumulative_logprob: float | None = None
    #: For each token, a map from token id to Logprob; None if not requested.
    logprobs: list[dict[int, Logprob]] | None = None
    #: "stop", "length", "abort" or "error"; None while it runs.
    finish_reason: str | None = None
    #: The stop string or stop token id that ended it; None for the model's end token.
    stop_reason: int | str | None = None
    #: The adapter that computed the tokens; None for the base model, and always over HTTP.
    lora_request: LoRARequest | None = None

    @property
    def finished(self) -> Truth:
        return Truth(self.finish_reason is not None)

    def __getattr__(self, name: str) -> NoReturn:
        raise unknown_name(self, name, _ADVICE)


@dataclass(slots=True)
class RequestMetrics:
    """The times of a request's tokens, for the offline API and the async engine."""

    #: Seconds since 1970.
    arrival_time: float
    #: Arrival on the clock of time.monotonic().
    arrival_ts: float
    #: Time of the first token on the clock of time.monotonic(); 0 before that token.
    first_token_ts: float = 0.0
    #: Time of the latest token on the clock of time.monotonic(); 0 before the first token.
    last_token_ts: float = 0.0
    #: Seconds from arrival to the first token.
    first_token_latency: float = 0.0
    #: Tokens of all branches.
    num_generation_tokens: int = 0

    def count_tokens(self, num_tokens: int, now_s: float) -> None:
        """Count tokens that arrive now."""
        if not num_tokens:
            return
        if not self.num_generation_tokens:
            self.first_token_ts, self.first_token_latency = now_s, now_s - self.arrival_ts
        self.last_token_ts = now_s
        self.num_generation_tokens += num_tokens


@dataclass(frozen=True, slots=True)
class PrefixMissReport:
    """Why the prefix cache held only a part of a prompt, or nothing. For the operator, not for
    clients."""

    #: A value of `core.sequence.MissReason`.
    reason: str
    #: The index of the first token that was not found.
    num_found_tokens: int
    #: The prompt's text around the first missing token; None without a tokenizer, or if the cache
    #: has no other tokens there.
    prompt_text: str | None = None
    #: The cached text at the same position; None if prompt_text is None.
    cached_text: str | None = None
    #: The request for which the prefix was evicted; None if it was not.
    evicted_by: str | None = None
    #: When the prefix was evicted, on the engine's clock.
    evicted_at_s: float | None = None


@dataclass(slots=True)
class RequestOutput:
    """The result of a request."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int = 0
    #: For each prompt token, a map from token id to Logprob, but None for the first token. None if
    #: not requested.
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    #: The error that ended it, if a branch has the finish_reason "error".
    error: str | None = None
    #: Set by the offline API only, once the request has ended. None without a prefix cache.
    prefix_miss: PrefixMissReport | None = None
    #: None over HTTP, where /metrics has the numbers.
    metrics: RequestMetrics | None = None
    #: The adapter of its branches.
    lora_request: LoRARequest | None = None

    @property
    def finished(self) -> bool:
        return all(output.finished for output in self.outputs)

    def __getattr__(self, name: str) -> NoReturn:
        raise unknown_name(self, name, _ADVICE)


@dataclass(slots=True)
class Delta:
    """The new part of a branch since the last call. finish_reason and stop_reason are set once, in
    the last part. If an error has ended the branch, no part has a finish_reason."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: LogprobEntries = field(default_factory=LogprobEntries)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
