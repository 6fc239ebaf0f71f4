"""OpenAI's requests as quire understands them.

Types are checked here, values by `SamplingParams` and `BeamSearchParams`. A field that nobody
knows, or that OpenAI has and quire has not yet, is refused by name; null means that a field was
left out. The fields below "ours" are the ones that vLLM and others have added at the top level.

Called by the API families. Knows no engine.
"""

import difflib
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

from quire.core.sampling_params import MAX_BEAM_WIDTH, BeamSearchParams, SamplingParams, Wish
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

# Options that a beam search has not, with the values that ask for nothing.
_NOT_FOR_BEAMS: Mapping[str, tuple[Any, ...]] = {
    "stream": (False,),
    "top_p": (1.0,),
    "top_k": (0, -1),
    "min_p": (0.0,),
    "presence_penalty": (0.0,),
    "frequency_penalty": (0.0,),
    "repetition_penalty": (1.0,),
    "seed": (),
    "stop": ([],),
    "stop_token_ids": ([],),
    "include_stop_str_in_output": (False,),
    "min_tokens": (0,),
    "logit_bias": ({},),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "skip_special_tokens": (True,),
}

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
    """What both APIs share.

    use_beam_search: the n choices are the results of a beam search of width n, best first. It has
        temperature, max_tokens, ignore_eos and length_penalty, and is not streamed.
    not_for_beams: options that it has not, with the values that ask for nothing.
    """

    not_for_beams: ClassVar[Mapping[str, tuple[Any, ...]]] = _NOT_FOR_BEAMS

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
    cache_salt: str | None = None
    use_beam_search: bool = False
    length_penalty: float | None = None

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

    def _wish(self, **more: Any) -> Wish:
        """The wish, with defaults for what was left out. Raises InvalidRequestError."""
        if self.use_beam_search:
            return self._beam_search_params(more["max_tokens"])
        if self.length_penalty is not None:
            raise InvalidRequestError(
                "length_penalty is set, but use_beam_search is not; set it to true, or leave"
                " length_penalty out",
                "length_penalty",
            )
        values = {name: getattr(self, name) for name in _SAMPLING_FIELDS}
        given = {name: value for name, value in values.items() if value is not None}
        return SamplingParams(**given, **more, logit_bias=_token_biases(self.logit_bias))

    def _beam_search_params(self, max_tokens: int | None) -> BeamSearchParams:
        for name, harmless in self.not_for_beams.items():
            value = getattr(self, name)
            if value is not None and value not in harmless:
                raise InvalidRequestError(
                    f"{name} is {value!r}, which does not go with use_beam_search; leave it out",
                    name,
                )
        width = 1 if self.n is None else self.n
        if not 1 <= width <= MAX_BEAM_WIDTH:
            raise InvalidRequestError(
                f"n is {width}, but with use_beam_search it must be at least 1 and at most"
                f" {MAX_BEAM_WIDTH}",
                "n",
            )
        return BeamSearchParams(
            beam_width=width,
            max_tokens=max_tokens,
            length_penalty=1.0 if self.length_penalty is None else self.length_penalty,
            temperature=0.0 if self.temperature is None else self.temperature,
            ignore_eos=bool(self.ignore_eos),
        )


class CompletionRequest(_GenerationBody):
    """POST /v1/completions.

    prompt: a text, the token ids of one, or a list of either; each gets n choices.
    logprobs: how many of the likeliest tokens to report at each position.
    echo: the prompt is part of the text, and of the logprobs.
    best_of: only as many as n; to choose among more is not supported yet.
    """

    not_supported: ClassVar[Mapping[str, tuple[Any, ...]]] = {"suffix": ("",)}
    not_for_beams: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **_NOT_FOR_BEAMS,
        "logprobs": (),
        "prompt_logprobs": (),
    }

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

    def to_wish(self) -> Wish:
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
        return self._wish(
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
    not_for_beams: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **_NOT_FOR_BEAMS,
        "logprobs": (False,),
        "top_logprobs": (),
    }

    messages: list[dict[str, Any]]
    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    # ours
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False

    def to_wish(self) -> Wish:
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
        return self._wish(
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
