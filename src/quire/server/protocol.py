"""OpenAI's requests as quire understands them.

Types are checked here, values by `SamplingParams`. A field that nobody knows, or that OpenAI has
and quire has not yet, is refused by name; null means that a field was left out. The fields below
"ours" are the ones that vLLM and others have added at the top level.

Called by the API families. Knows no engine.
"""

import difflib
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

from quire.core.sampling_params import SamplingParams
from quire.errors import InvalidRequestError

_SAMPLING_FIELDS = (
    "n",
    "temperature",
    "top_p",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "stop",
    "top_k",
    "min_p",
    "repetition_penalty",
    "min_tokens",
    "ignore_eos",
    "stop_token_ids",
    "include_stop_str_in_output",
    "bad_words",
    "allowed_token_ids",
    "skip_special_tokens",
)

# What fits the messages between the processes; SamplingParams has the bounds that mean something.
Count = Annotated[int, Field(lt=2**31)]
Priority = Annotated[int, Field(ge=-(2**31), lt=2**31)]


class _Body(BaseModel):
    """A JSON object with known fields only.

    not_supported: fields of OpenAI's API that quire has not, with the values that ask for nothing.
    """

    model_config = ConfigDict(extra="forbid", strict=True)
    not_supported: ClassVar[Mapping[str, tuple[Any, ...]]] = {}

    @model_validator(mode="before")
    @classmethod
    def _keep_known_fields(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        kept = {}
        for name, value in body.items():
            if value is None or value in cls.not_supported.get(name, ()):
                continue
            if name not in cls.model_fields:
                raise InvalidRequestError(cls._refusal(name), name)
            kept[name] = value
        return kept

    @classmethod
    def _refusal(cls, name: str) -> str:
        if name in cls.not_supported:
            return f"{name} is not supported yet; leave it out"
        near = difflib.get_close_matches(name, cls.model_fields, n=1, cutoff=0.5)
        hint = f"; did you mean {near[0]}?" if near else "; leave it out"
        return f"unknown field {name!r}{hint}"


class StreamOptions(_Body):
    """include_usage: a last chunk with the usage of the whole request."""

    not_supported: ClassVar[Mapping[str, tuple[Any, ...]]] = {"include_obfuscation": (False,)}

    include_usage: bool = False


class _GenerationBody(_Body):
    """What both APIs share."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: Count | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    logit_bias: dict[str, float] | None = None
    user: str | None = None
    # ours
    top_k: Count | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: Count | None = None
    ignore_eos: bool | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    skip_special_tokens: bool | None = None
    priority: Priority = 0

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> "_GenerationBody":
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError(
                "stream_options is set, but stream is not; set stream to true, or leave it out",
                "stream_options",
            )
        return self

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def _sampling_params(self, **more: Any) -> SamplingParams:
        """The wish, with defaults for what was left out. Raises InvalidRequestError."""
        values = {name: getattr(self, name) for name in _SAMPLING_FIELDS}
        given = {name: value for name, value in values.items() if value is not None}
        return SamplingParams(**given, **more, logit_bias=_token_biases(self.logit_bias))


class CompletionRequest(_GenerationBody):
    """POST /v1/completions.

    prompt: a text, the token ids of one, or a list of either; each gets n choices.
    logprobs: how many of the likeliest tokens to report at each position.
    echo: the prompt is part of the text, and of the logprobs.
    best_of: only as many as n; to choose among more is not supported yet.
    """

    not_supported: ClassVar[Mapping[str, tuple[Any, ...]]] = {"suffix": ("",)}

    prompt: str | list[int] | list[str] | list[list[int]]
    echo: bool = False
    logprobs: int | None = None
    best_of: int | None = None
    prompt_logprobs: int | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts as a list. Raises InvalidRequestError if there is none."""
        prompt: Any = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if not prompt:
            raise InvalidRequestError("prompt is an empty list; give at least one", "prompt")
        return [prompt] if isinstance(prompt[0], int) else prompt

    def to_sampling_params(self) -> SamplingParams:
        """Raises InvalidRequestError."""
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise InvalidRequestError(
                f"best_of is {self.best_of}, but choosing the best of more than n is not supported "
                "yet; leave it out",
                "best_of",
            )
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidRequestError(
                "prompt_logprobs can't be streamed; set stream to false, or echo and logprobs",
                "prompt_logprobs",
            )
        echoed = self.logprobs if self.echo else None
        wanted = [count for count in (self.prompt_logprobs, echoed) if count is not None]
        return self._sampling_params(
            max_tokens=16 if self.max_tokens is None else self.max_tokens,
            logprobs=self.logprobs,
            prompt_logprobs=max(wanted, default=None),
        )


class ChatCompletionRequest(_GenerationBody):
    """POST /v1/chat/completions.

    messages: objects with a role and a content, checked by `text.chat_messages`; a template may
        read further fields of them.
    logprobs, top_logprobs: report each token's, and those of so many likeliest ones.
    add_generation_prompt: null means true, unless continue_final_message is set.
    """

    not_supported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "audio": (),
        "function_call": ("none",),
        "functions": ([],),
        "metadata": (),
        "modalities": (["text"],),
        "moderation": (),
        "parallel_tool_calls": (True, False),  # says how to call tools, of which there are none
        "prediction": (),
        "prompt_cache_key": (),
        "prompt_cache_retention": (),
        "reasoning_effort": (),
        "response_format": ({"type": "text"},),
        "safety_identifier": (),
        "service_tier": ("auto", "default"),
        "store": (False,),
        "tool_choice": ("none", "auto"),
        "tools": ([],),
        "verbosity": (),
        "web_search_options": (),
    }

    messages: list[dict[str, Any]]
    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    # ours
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False

    def to_sampling_params(self) -> SamplingParams:
        """Raises InvalidRequestError."""
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequestError(
                "top_logprobs is set, but logprobs is not; set logprobs to true", "top_logprobs"
            )
        if None not in (self.max_tokens, self.max_completion_tokens):
            raise InvalidRequestError(
                "max_tokens and its newer name, max_completion_tokens, are both set; give one",
                "max_completion_tokens",
            )
        return self._sampling_params(
            max_tokens=(
                self.max_tokens
                if self.max_completion_tokens is None
                else self.max_completion_tokens
            ),
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
        )


def _token_biases(logit_bias: Mapping[str, float] | None) -> dict[int, float] | None:
    """JSON's keys are strings: the token ids in them."""
    if logit_bias is None:
        return None
    try:
        return {int(token): bias for token, bias in logit_bias.items()}
    except ValueError as error:
        raise InvalidRequestError(
            f"logit_bias has a key that is no token id: {error}", "logit_bias"
        ) from error
