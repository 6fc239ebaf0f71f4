"""Results of a request as its caller gets them: whole, or piece by piece.

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
    """One token at one position. rank: 1 is the most likely of the vocabulary."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


class Truth(int):
    """True or False, which may also be called: what is an attribute here is a method in vLLM."""

    __slots__ = ()

    def __call__(self) -> bool:
        return bool(self)

    def __repr__(self) -> str:
        return repr(bool(self))


@dataclass(slots=True)
class CompletionOutput:
    """One branch of a request.

    token_ids: generated tokens, an end token included. logprobs: one map (token id -> Logprob) per
    token, if asked for. cumulative_logprob: the sum over the tokens, if logprobs were asked for,
    and of a beam search's results.
    finish_reason: "stop", "length", "abort" or "error"; None while it goes on.
    stop_reason: the stop string or stop token id that ended it; None for the model's end token.
    lora_request: the adapter that it was computed with; None: the base model, and over HTTP.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    lora_request: LoRARequest | None = None

    @property
    def finished(self) -> Truth:
        return Truth(self.finish_reason is not None)

    def __getattr__(self, name: str) -> NoReturn:
        raise unknown_name(self, name, _ADVICE)


@dataclass(slots=True)
class RequestMetrics:
    """When a request's tokens came, of the offline API and the async engine.

    arrival_time: seconds since 1970. first_token_ts, last_token_ts: on the clock of
    time.monotonic(); 0 before the first. first_token_latency: seconds from arrival to the first
    token. num_generation_tokens: of all branches.
    """

    arrival_time: float
    arrival_ts: float
    first_token_ts: float = 0.0
    last_token_ts: float = 0.0
    first_token_latency: float = 0.0
    num_generation_tokens: int = 0

    def note(self, num_tokens: int, now_s: float) -> None:
        """So many tokens came now."""
        if not num_tokens:
            return
        if not self.num_generation_tokens:
            self.first_token_ts, self.first_token_latency = now_s, now_s - self.arrival_ts
        self.last_token_ts = now_s
        self.num_generation_tokens += num_tokens


@dataclass(frozen=True, slots=True)
class PrefixMissReport:
    """Why the prefix cache had no more of a prompt; for the operator, not for clients.

    reason: a value of `core.sequence.MissReason`. num_found_tokens: the index of the first token
        that was not found.
    prompt_text, cached_text: where the cache has other tokens: the text around that place in the
        prompt, and in what the cache has. None without a tokenizer.
    evicted_by, evicted_at_s: where it was evicted: for which request, when on the engine's clock.
    """

    reason: str
    num_found_tokens: int
    prompt_text: str | None = None
    cached_text: str | None = None
    evicted_by: str | None = None
    evicted_at_s: float | None = None


@dataclass(slots=True)
class RequestOutput:
    """A request's result. prompt_logprobs: None for the first token, then one map per token.

    error: what ended it, where a branch's finish_reason is "error".
    prefix_miss: of the offline API only, once the request has ended; None without a prefix cache.
    metrics: None over HTTP, whose numbers are at /metrics. lora_request: as of its branches.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int = 0
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    error: str | None = None
    prefix_miss: PrefixMissReport | None = None
    metrics: RequestMetrics | None = None
    lora_request: LoRARequest | None = None

    @property
    def finished(self) -> bool:
        return all(output.finished for output in self.outputs)

    def __getattr__(self, name: str) -> NoReturn:
        raise unknown_name(self, name, _ADVICE)


@dataclass(slots=True)
class Delta:
    """What is new in a branch since the last look. The ends come once, with the last of it."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: LogprobEntries = field(default_factory=LogprobEntries)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
