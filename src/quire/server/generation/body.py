"""OpenAI's requests for generated text, as quire understands them.

Types are checked here, values by `SamplingParams` and `BeamSearchParams`, amounts by `limits`. The
fields below "ours" are the ones that vLLM and others have added at the top level. `docs/api.md`
lists every field. Called by the API families. Knows no engine.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, NamedTuple

from pydantic import Field, model_validator

from quire.core.sampling_params import (
    MAX_BEAM_WIDTH,
    MAX_BRANCHES,
    MAX_LENGTH_PENALTY,
    SEED_LIMIT,
    BeamSearchParams,
    SamplingParams,
    sampling_params_of,
)
from quire.engine_client.inputs import MAX_NAME_LENGTH
from quire.errors import InvalidRequestError, shown
from quire.server.http.body import Body

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
    "prompt_logprobs",
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
    "prompt_logprobs": (),
}

# Fields that other engines have and quire has not, with the values that ask for nothing.
_NOT_SUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "detokenize": (True,),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "logits_processors": ([],),
    "return_tokens_as_token_ids": (False,),
    "spaces_between_special_tokens": (True,),
    "structured_outputs": (),
    "truncate_prompt_tokens": (),
}

# What fits the messages between the processes; SamplingParams has the bounds that mean something.
Count = Annotated[int, Field(lt=2**31)]
Priority = Annotated[int, Field(ge=-(2**31), lt=2**31)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]

# At the first wrong element: a list may have millions.
TokenIds = Annotated[list[int], Field(fail_fast=True)]
Texts = Annotated[list[str], Field(fail_fast=True)]


def _left_out(**schema: Any) -> Any:
    """A field that is None where it was left out.

    schema: what the OpenAPI document says of its values, which are checked elsewhere.
    """
    return Field(default=None, json_schema_extra=schema)


_TOKEN_IDS = {"items": {"type": "integer", "minimum": 0}}
_WORDS = {"items": {"type": "string", "minLength": 1}}
_PENALTY = {"minimum": -2, "maximum": 2}


class Params(NamedTuple):
    """What a body asks for. beams: of a beam search, of which `sampling` is then made."""

    sampling: SamplingParams
    beams: BeamSearchParams | None = None


class StreamOptions(Body):
    """include_usage: a last chunk with the usage of the whole call.

    continuous_usage_stats: every chunk has the usage of the call so far (ours).
    """

    not_supported: ClassVar[Mapping[str, tuple[Any, ...]]] = {"include_obfuscation": (False,)}

    include_usage: bool = False
    continuous_usage_stats: bool = False


class GenerationBody(Body):
    """What both APIs share.

    deadline_s: seconds from its arrival after which the call is ended with an error.
    return_token_ids: the answer has the token ids of the prompt and of each choice.
    use_beam_search: the n choices are the results of a beam search of width n, best first. It has
        temperature, max_tokens, ignore_eos and length_penalty, and is not streamed.
    not_for_beams: options that it has not, with the values that ask for nothing.
    """

    takes_extra_body: ClassVar[bool] = True
    not_for_beams: ClassVar[Mapping[str, tuple[Any, ...]]] = _NOT_FOR_BEAMS

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: Count | None = _left_out(minimum=0)
    n: int | None = _left_out(minimum=1, maximum=MAX_BRANCHES)
    temperature: float | None = _left_out(minimum=0, maximum=100)
    top_p: float | None = _left_out(exclusiveMinimum=0, maximum=1)
    presence_penalty: float | None = _left_out(**_PENALTY)
    frequency_penalty: float | None = _left_out(**_PENALTY)
    seed: int | None = _left_out(minimum=-(SEED_LIMIT >> 1), maximum=SEED_LIMIT - 1)
    stop: str | Texts | None = _left_out(minLength=1, **_WORDS)
    logit_bias: dict[str, Any] | None = _left_out(
        propertyNames={"pattern": "^(0|[1-9][0-9]{0,9})$"},
        additionalProperties={"type": "number", "minimum": -100, "maximum": 100},
    )
    user: str | None = None
    # ours
    top_k: Count | None = _left_out(minimum=-1)
    min_p: float | None = _left_out(minimum=0, maximum=1)
    repetition_penalty: float | None = _left_out(minimum=0.01, maximum=100)
    min_tokens: Count | None = _left_out(minimum=0)
    ignore_eos: bool | None = None
    stop_token_ids: TokenIds | None = _left_out(**_TOKEN_IDS)
    include_stop_str_in_output: bool | None = None
    bad_words: Texts | None = _left_out(**_WORDS)
    allowed_token_ids: TokenIds | None = _left_out(minItems=1, **_TOKEN_IDS)
    skip_special_tokens: bool | None = None
    prompt_logprobs: int | None = _left_out(minimum=0)
    return_token_ids: bool = False
    priority: Priority = 0
    cache_salt: str | None = _left_out(maxLength=MAX_NAME_LENGTH)
    deadline_s: Seconds | None = None
    use_beam_search: bool = False
    length_penalty: float | None = _left_out(
        minimum=-MAX_LENGTH_PENALTY, maximum=MAX_LENGTH_PENALTY
    )

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> "GenerationBody":
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError(
                "stream_options is set, but stream is not; set stream to true, or leave it out",
                "stream_options",
            )
        return self

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def continuous_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.continuous_usage_stats

    def _params(self, max_tokens: int | None, logprobs: int | None, **more: Any) -> Params:
        """The body's fields, with defaults for what was left out. Raises InvalidRequestError.

        more: SamplingParams' fields that differ from the body's.
        """
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidRequestError(
                "prompt_logprobs can't be streamed; set stream to false, or leave it out",
                "prompt_logprobs",
            )
        if self.use_beam_search:
            beams = self._beam_search_params(max_tokens)
            return Params(sampling_params_of(beams), beams)
        if self.length_penalty is not None:
            raise InvalidRequestError(
                "length_penalty is set, but use_beam_search is not; set it to true, or leave"
                " length_penalty out",
                "length_penalty",
            )
        values = {name: getattr(self, name) for name in _SAMPLING_FIELDS} | more
        given = {name: value for name, value in values.items() if value is not None}
        return Params(
            SamplingParams(
                **given,
                max_tokens=max_tokens,
                logprobs=logprobs,
                logit_bias=_token_biases(self.logit_bias),
            )
        )

    def _beam_search_params(self, max_tokens: int | None) -> BeamSearchParams:
        for name, harmless in self.not_for_beams.items():
            value = getattr(self, name)
            if value is not None and value not in harmless:
                raise InvalidRequestError(
                    f"{name} is {shown(value)}, which does not go with use_beam_search; leave it"
                    " out",
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


class CompletionRequest(GenerationBody):
    """POST /v1/completions.

    prompt: a text, the token ids of one, or a list of either; each gets n choices.
    logprobs: how many of the likeliest tokens to report at each position.
    echo: the prompt is part of the text, and of the logprobs. With it max_tokens may be 0: nothing
        but the prompt comes back, to be scored.
    best_of: only as many as n; to choose among more is not supported yet.
    add_special_tokens: whether a text prompt gets those that the tokenizer puts around a text.
    """

    not_supported: ClassVar[Mapping[str, tuple[Any, ...]]] = {**_NOT_SUPPORTED, "suffix": ("",)}
    not_for_beams: ClassVar[Mapping[str, tuple[Any, ...]]] = {**_NOT_FOR_BEAMS, "logprobs": ()}

    prompt: str | TokenIds | Texts | Annotated[list[TokenIds], Field(fail_fast=True)]
    echo: bool = False
    logprobs: int | None = _left_out(minimum=0)
    best_of: int | None = _left_out(minimum=1, maximum=MAX_BRANCHES)
    # ours
    add_special_tokens: bool = True

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts as a list. Raises InvalidRequestError if there is none."""
        prompt: Any = self.prompt
        if isinstance(prompt, str):
            return [prompt]
        if not prompt:
            raise InvalidRequestError("prompt is an empty list; give at least one", "prompt")
        return [prompt] if isinstance(prompt[0], int) else prompt

    @property
    def scores_only(self) -> bool:
        """The prompt is echoed and nothing generated. The engine makes one token all the same."""
        return self.echo and self.max_tokens == 0 and not self.use_beam_search

    def to_params(self) -> Params:
        """Raises InvalidRequestError."""
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise InvalidRequestError(
                f"best_of is {self.best_of}, but choosing the best of more than n is not supported "
                "yet; leave it out",
                "best_of",
            )
        echoed = self.logprobs if self.echo else None
        wanted = [count for count in (self.prompt_logprobs, echoed) if count is not None]
        prompt_logprobs = max(wanted, default=None)
        if self.scores_only:
            if self.min_tokens:
                raise InvalidRequestError(
                    f"min_tokens is {self.min_tokens}, above max_tokens, 0", "min_tokens"
                )
            return self._params(1, None, prompt_logprobs=prompt_logprobs)
        max_tokens = 16 if self.max_tokens is None else self.max_tokens
        return self._params(max_tokens, self.logprobs, prompt_logprobs=prompt_logprobs)


class TemplateOptions(Body):
    """How messages become a prompt.

    add_generation_prompt: null means true, unless continue_final_message is set.
    """

    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False


_TEXT_PART = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
}
_MESSAGE = {
    "type": "object",
    "required": ["role"],
    "properties": {
        "role": {"type": "string", "minLength": 1},
        "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": _TEXT_PART}]},
        "name": {"type": "string"},
    },
}
Messages = Annotated[
    list[dict[str, Any]],
    Field(fail_fast=True, json_schema_extra={"items": _MESSAGE, "minItems": 1}),
]
"""Objects with a role and a content, checked by `text.chat_messages`."""


class ChatCompletionRequest(GenerationBody, TemplateOptions):
    """POST /v1/chat/completions.

    messages: a template may read further fields of them, such as name.
    logprobs, top_logprobs: report each token's, and those of so many likeliest ones.
    add_special_tokens: whether the rendered messages get those that the tokenizer puts around a
        text. Most templates write them out themselves.
    """

    not_supported: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **_NOT_SUPPORTED,
        "audio": (),
        "best_of": (1,),
        "chat_template": (),
        "documents": ([],),
        "echo": (False,),
        "function_call": ("none",),
        "functions": ([],),
        "include_reasoning": (True,),
        "metadata": (),
        "modalities": (["text"],),
        "moderation": (),
        "parallel_tool_calls": (True, False),  # says how to call tools, of which there are none
        "prediction": (),
        "prompt_cache_key": (),
        "prompt_cache_options": ({}, {"mode": "implicit"}),
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

    messages: Messages
    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    logprobs: bool = False
    top_logprobs: int | None = _left_out(minimum=0)
    # ours
    add_special_tokens: bool = False

    def to_params(self) -> Params:
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
        given = self.max_completion_tokens
        return self._params(
            self.max_tokens if given is None else given,
            (self.top_logprobs or 0) if self.logprobs else None,
        )


def _token_biases(logit_bias: Mapping[str, Any] | None) -> dict[int, Any] | None:
    """JSON's keys are strings: the token ids in them, each written in one way only.

    The numbers are checked by SamplingParams, one by one.
    """
    if logit_bias is None:
        return None
    for key in logit_bias:
        if not (key.isascii() and key.isdecimal() and len(key) <= 10 and str(int(key)) == key):
            raise InvalidRequestError(
                f'logit_bias has the key {key!r:.40}, but keys must be token ids, such as "42"',
                "logit_bias",
            )
    return {int(key): bias for key, bias in logit_bias.items()}
