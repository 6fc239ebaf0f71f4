"""The fields of OpenAI's and vLLM's bodies for generated text, and their conversion to params.

Types are checked here, values by `SamplingParams` and `BeamSearchParams`, amounts by `limits`. The
fields marked as extensions were added to the top level by vLLM and other engines. `docs/api.md`
lists every field. The body class of a route adds the route's fields.
"""

from abc import ABC
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal

from pydantic import model_validator

from quire.core.sampling_checks import LOGIT_BIAS_BOUNDS, MAX_LOGPROB_TOKEN_IDS
from quire.core.sampling_params import (
    MAX_BEAM_WIDTH,
    BeamSearchParams,
    SamplingParams,
    sampling_params_of,
)
from quire.errors import InvalidRequestError, shown
from quire.server.generation.answer_defaults import AnswerDefaults
from quire.server.generation.answer_format import FORMAT_FIELDS, AnswerFormatFields
from quire.server.generation.call_body import (
    HINTS,
    TOKEN_IDS,
    WORDS,
    CallBody,
    Count,
    Params,
    Texts,
    TokenIds,
    bounded,
    left_out,
)
from quire.server.generation.sampling_fields import SamplingFields
from quire.server.http.body import Body, UnknownFields
from quire.server.limits import CallLimits

_TRUNCATION = ("truncate_prompt_tokens", "truncation_side")

_SAMPLING_FIELDS = (
    *SamplingFields.model_fields,
    "n",
    "include_stop_str_in_output",
    "bad_words",
    "allowed_token_ids",
    "skip_special_tokens",
    "prompt_logprobs",
    *_TRUNCATION,
)

# Options that a beam search does not support. The listed values are accepted without effect.
NOT_FOR_BEAMS: Mapping[str, tuple[Any, ...]] = {
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
    "logprob_token_ids": (),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
}

# Fields of other engines that quire does not support. The listed values are accepted without
# effect.
NOT_SUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "detokenize": (True,),
    "early_stopping": (False,),
    "logits_processors": ([],),
    "safe_prompt": (False,),
}

_MAX_NAMED_KEYS = 8
"""Maximum number of keys of logit_bias in an error message."""


class StreamOptions(Body):
    """Options of a streamed answer."""

    unknown_fields: ClassVar[UnknownFields] = "ignore"
    hints: ClassVar[frozenset[str]] = frozenset({"include_obfuscation"})
    notes: ClassVar[Mapping[str, str]] = {
        "include_usage": "a last event without choices has the usage of the whole call",
        "continuous_usage_stats": "each event has the usage so far",
    }

    #: Whether the stream ends with a chunk that has the usage of the whole call.
    include_usage: bool = False
    #: Whether every chunk has the usage so far. Has no effect if include_usage is set to false. Not
    #: in OpenAI's API.
    continuous_usage_stats: bool = False


class GenerationBody(AnswerFormatFields, SamplingFields, CallBody, ABC):
    """The fields that all routes for generated text share."""

    takes_extra_body: ClassVar[bool] = True
    hints: ClassVar[frozenset[str]] = HINTS | {"spaces_between_special_tokens"}
    #: Options that a beam search does not support. The listed values are accepted without effect.
    not_for_beams: ClassVar[Mapping[str, tuple[Any, ...]]] = NOT_FOR_BEAMS
    list_bounds: ClassVar[Mapping[str, str]] = {
        **SamplingFields.list_bounds,
        "bad_words": "max_list_length",
        "allowed_token_ids": "max_list_length",
        "logit_bias": "max_list_length",
        "logprob_token_ids": "max_list_length",
    }
    notes: ClassVar[Mapping[str, str]] = {
        "model": "the name in `/v1/models`",
        "stream": "the answer comes as server-sent events, piece by piece",
        "stream_options": "only with `stream`",
        "max_tokens": "the most tokens to generate for each choice",
        "n": "choices of each prompt",
        "logit_bias": "token id, as a string, to a number that is added to its logit",
        "user": "accepted; it changes no answer",
        "random_seed": "Mistral's name of `seed`",
        "include_stop_str_in_output": "keep the stop string, or the text of the end token",
        "bad_words": "texts that are never generated",
        "allowed_token_ids": "only these are generated",
        "skip_special_tokens": "leave special tokens out of the text; true where left out",
        "prompt_logprobs": "log-probabilities of the prompt's tokens, and of this many likeliest "
        "ones at each position; not streamed",
        "logprob_token_ids": "with `logprobs`: of exactly these tokens, in place of the likeliest",
        "return_tokens_as_token_ids": "log-probabilities name tokens as `token_id:42`",
        "return_token_ids": "the answer has the token ids of prompt and choices",
        "priority": "smaller goes first, under the policy `priority`",
        "cache_salt": "cached prefixes are shared only with calls that have the same salt and key",
        "deadline_s": "seconds after which the call ends with an error",
        "speculation_history": "false: the answer is not kept for drafts of later answers",
        "truncate_prompt_tokens": "a longer prompt is cut to this many last tokens; -1: to as "
        "many as leave room for one more",
        "truncation_side": "`right`: the first tokens are kept instead",
        "use_beam_search": "the choices are the results of a beam search of width `n`, best first",
        "length_penalty": "with `use_beam_search`: exponent of the length by which scores "
        "are divided",
    }

    stream_options: StreamOptions | None = None
    max_tokens: Count | None = left_out(minimum=0)
    n: int | None = bounded("n")
    logit_bias: dict[str, Any] | None = left_out(
        propertyNames={"pattern": "^(0|[1-9][0-9]{0,9})$"},
        additionalProperties={"type": "number", **LOGIT_BIAS_BOUNDS.schema()},
    )
    user: str | None = None
    # extensions to OpenAI's API
    random_seed: int | None = bounded("seed")
    include_stop_str_in_output: bool | None = None
    bad_words: Texts | None = left_out(**WORDS)
    allowed_token_ids: TokenIds | None = left_out(minItems=1, **TOKEN_IDS)
    skip_special_tokens: bool | None = None
    prompt_logprobs: int | None = bounded("prompt_logprobs")
    logprob_token_ids: TokenIds | None = left_out(
        minItems=1, maxItems=MAX_LOGPROB_TOKEN_IDS, **TOKEN_IDS
    )
    truncate_prompt_tokens: Count | None = bounded("truncate_prompt_tokens")
    truncation_side: Literal["left", "right"] | None = None
    #: Whether the answer has the token ids of the prompt and of each choice.
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    #: Whether the n choices are the results of a beam search of width n, best first. The search
    #: uses temperature, max_tokens, ignore_eos and length_penalty, and can't be streamed.
    use_beam_search: bool = False
    length_penalty: float | None = bounded("length_penalty")

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> "GenerationBody":
        if self.stream_options is not None and not self.stream:
            raise InvalidRequestError(
                "stream_options is set, but stream is not; set stream to true, or leave it out",
                "stream_options",
            )
        return self

    @property
    def is_truncated(self) -> bool:
        """Whether a prompt that is too long is cut."""
        return self.truncate_prompt_tokens is not None

    @property
    def format_field(self) -> str:
        given = (name for name in FORMAT_FIELDS if getattr(self, name) is not None)
        return next(given, "structured_outputs")

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def continuous_usage(self) -> bool:
        options = self.stream_options
        if options is None or not options.continuous_usage_stats:
            return False
        return options.include_usage or "include_usage" not in options.model_fields_set

    @property
    def gives_token_ids(self) -> bool:
        return self.return_token_ids

    def adopt(self, defaults: AnswerDefaults) -> None:
        if defaults.names_token_ids and "return_tokens_as_token_ids" not in self.model_fields_set:
            self.return_tokens_as_token_ids = True
        if defaults.includes_usage and self.stream:
            self.stream_options = self.stream_options or StreamOptions()
            self.stream_options.include_usage = True
            self.stream_options.continuous_usage_stats = True

    def check_amounts(self, limits: CallLimits, max_logprobs: int) -> None:
        limits.check_n(self.n)
        limits.check(self, self.num_prompts, max_logprobs)

    def _make_params(self, max_tokens: int | None, logprobs: int | None, **more: Any) -> Params:
        """The params that the fields ask for, with defaults for fields that were left out. `more`
        overrides fields of SamplingParams. Raises InvalidRequestError."""
        if self.prompt_logprobs is not None and self.stream:
            raise InvalidRequestError(
                "prompt_logprobs can't be streamed; set stream to false, or leave it out",
                "prompt_logprobs",
            )
        # A beam search supports few options. Refuse the others.
        if self.use_beam_search:
            beams = self._beam_search_params(max_tokens)
            kept = {name: getattr(self, name) for name in _TRUNCATION}
            return Params(replace(sampling_params_of(beams), **kept), beams)
        if self.length_penalty is not None:
            raise InvalidRequestError(
                "length_penalty is set, but use_beam_search is not; set it to true, or leave"
                " length_penalty out",
                "length_penalty",
            )
        # Collect the sampling fields. Two fields are alternatives to others: a second name of
        # `seed`, and a list of tokens in place of the likeliest.
        values = self.given(_SAMPLING_FIELDS)
        values |= {"structured_outputs": self.answer_format(), **more}
        if self.random_seed is not None:
            if self.seed not in (None, self.random_seed):
                raise InvalidRequestError(
                    "seed and random_seed are both set; give one", "random_seed"
                )
            values["seed"] = self.random_seed
        if self.logprob_token_ids is not None:
            if logprobs is None:
                raise InvalidRequestError(
                    "logprob_token_ids is set, but logprobs of generated tokens are not asked for;"
                    " set logprobs, or leave it out",
                    "logprob_token_ids",
                )
            values["logprob_token_ids"], logprobs = self.logprob_token_ids, None
        # Fields that were left out take the defaults of SamplingParams.
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
                    f"{name} is {shown(value)}, which use_beam_search does not support; leave it"
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


def _token_biases(logit_bias: Mapping[str, Any] | None) -> dict[int, Any] | None:
    """logit_bias with its keys converted from JSON strings to token ids. Keys such as "042" are
    refused. SamplingParams checks the biases."""
    if logit_bias is None:
        return None
    wrong = [key for key in logit_bias if not _is_token_id(key)]
    if wrong:
        named = ", ".join(f"{key!r:.40}" for key in wrong[:_MAX_NAMED_KEYS])
        raise InvalidRequestError(
            f"logit_bias has the key{'s' * (len(wrong) > 1)} {named}, but keys must be token ids,"
            ' such as "42"',
            "logit_bias",
        )
    return {int(key): bias for key, bias in logit_bias.items()}


def _is_token_id(key: str) -> bool:
    return key.isascii() and key.isdecimal() and len(key) <= 10 and str(int(key)) == key
