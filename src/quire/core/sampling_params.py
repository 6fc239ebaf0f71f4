"""Sampling parameters as clients give them, and as the engine gets them.

`SamplingParams` and `BeamSearchParams` hold a client's options under their usual names; a bad value
raises an error that names the field and its bound. `DecodingParams` holds them resolved against a
model: every field has a value, and everything is in token ids. Only `DecodingParams` enters the
engine.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from typing import Any, ClassVar, Self, TypeVar

from quire.compat.sampling_fields import COMPAT_BEAMS, COMPAT_SAMPLING
from quire.core.checked_fields import CheckedFields, answers_mistakes
from quire.core.pooling import ModelPooling, PoolingParams
from quire.core.sampling_checks import (
    NumberBounds,
    allowed_token_ids,
    flag,
    integer,
    kind_of,
    logit_bias,
    logprob_token_ids,
    number,
    one_of,
    stop_strings,
    strings,
    token_ids,
)
from quire.core.structured_outputs import StructuredOutputsParams
from quire.errors import InvalidRequestError

MAX_BRANCHES = 1024
MAX_BEAM_WIDTH = 64
SEED_LIMIT = 1 << 64
MAX_TOKENS = (1 << 31) - 1
"""The upper bound of max_tokens and min_tokens, longer than any context."""

T = TypeVar("T")

_GUIDED: Mapping[str, Callable[[Any], StructuredOutputsParams]] = {
    "guided_json": lambda value: StructuredOutputsParams(json=value),
    "guided_regex": lambda value: StructuredOutputsParams(regex=value),
    "guided_choice": lambda value: StructuredOutputsParams(choice=value),
    "guided_grammar": lambda value: StructuredOutputsParams(grammar=value),
}
"""Older parameter names, each for one kind of structured outputs."""


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """A model's own sampling options (`generation_config.json`), used where the caller set none."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


class RequestOutputKind(Enum):
    """Content of each output of a stream: the whole text so far, the new text, or only the final
    text."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


Checks = Mapping[str, Callable[[Any], Any]]


_INTEGERS: Mapping[str, NumberBounds] = {
    "n": NumberBounds(1, MAX_BRANCHES, is_optional=False),
    "top_k": NumberBounds(-1),
    "seed": NumberBounds(-(SEED_LIMIT >> 1), SEED_LIMIT - 1),
    "max_tokens": NumberBounds(1, MAX_TOKENS),
    "min_tokens": NumberBounds(0, MAX_TOKENS, is_optional=False),
    "logprobs": NumberBounds(-1),
    "prompt_logprobs": NumberBounds(-1),
    "truncate_prompt_tokens": NumberBounds(-1, MAX_TOKENS),
}
_NUMBERS: Mapping[str, NumberBounds] = {
    "temperature": NumberBounds(0, 100),
    "top_p": NumberBounds(0, 1),
    "min_p": NumberBounds(0, 1),
    "presence_penalty": NumberBounds(-2, 2, is_optional=False),
    "frequency_penalty": NumberBounds(-2, 2, is_optional=False),
    "repetition_penalty": NumberBounds(0.01, 100),
}
_BEAM_INTEGERS: Mapping[str, NumberBounds] = {
    "beam_width": NumberBounds(1, MAX_BEAM_WIDTH, is_optional=False),
    "max_tokens": _INTEGERS["max_tokens"],
}
_BEAM_NUMBERS: Mapping[str, NumberBounds] = {
    "length_penalty": NumberBounds(-5, 5, is_optional=False),
    "temperature": _NUMBERS["temperature"]._replace(is_optional=False),
}

BOUNDS: Mapping[str, NumberBounds] = {**_BEAM_INTEGERS, **_BEAM_NUMBERS, **_INTEGERS, **_NUMBERS}
"""The bounds of every numeric parameter; the request bodies of the HTTP APIs use them, too. A
parameter of both classes has the bounds of SamplingParams."""


def _integers(bounds: Mapping[str, NumberBounds]) -> Checks:
    return {name: partial(integer, name, **each._asdict()) for name, each in bounds.items()}


def _numbers(bounds: Mapping[str, NumberBounds]) -> Checks:
    return {name: partial(number, name, **each._asdict()) for name, each in bounds.items()}


def _flags(*names: str) -> Checks:
    return {name: partial(flag, name) for name in names}


_CHECKS: Checks = {
    **_integers(_INTEGERS),
    **_numbers(_NUMBERS),
    **_flags("include_stop_str_in_output", "ignore_eos", "skip_special_tokens", "detokenize"),
    "stop": stop_strings,
    "stop_token_ids": partial(token_ids, "stop_token_ids"),
    "bad_words": partial(strings, "bad_words"),
    "allowed_token_ids": allowed_token_ids,
    "logprob_token_ids": logprob_token_ids,
    "logit_bias": logit_bias,
    "truncation_side": partial(one_of, "truncation_side", ("left", "right")),
    "structured_outputs": partial(kind_of, "structured_outputs", StructuredOutputsParams, True),
    "output_kind": partial(kind_of, "output_kind", RequestOutputKind, False),
}
"""The checks of SamplingParams' fields."""

_BEAM_CHECKS: Checks = {
    **_integers(_BEAM_INTEGERS),
    **_numbers(_BEAM_NUMBERS),
    **_flags("ignore_eos"),
}


@answers_mistakes
@dataclass(slots=True, kw_only=True)
class SamplingParams(CheckedFields):
    """Options of one generation.

    Fields may be assigned. A value is checked when it is set; fields are checked together when a
    request is made. A request takes a copy, so later changes do not affect it. Numbers and lists of
    token ids may be NumPy's or torch's.

    Raises InvalidRequestError (a ValueError) that names the field, its value and the bound.
    """

    #: Number of parallel samples of the same prompt.
    n: int = 1
    #: Divides the logits; 0 is greedy. None uses the model's default, as for top_p, top_k, min_p
    #: and repetition_penalty.
    temperature: float | None = None
    #: Keeps the smallest set of tokens whose probabilities reach top_p; 0 keeps the likeliest
    #: token, as a temperature of 0 does. After temperature, min_p applies first, then top_k, then
    #: top_p.
    top_p: float | None = None
    #: Keeps the top_k most likely tokens; 0 or -1 keeps all.
    top_k: int | None = None
    #: Keeps the tokens that are at least min_p times as likely as the most likely one.
    min_p: float | None = None
    #: Subtracted once from the logit of each token that was generated before (OpenAI's definition).
    presence_penalty: float = 0.0
    #: Subtracted from a token's logit for each time that the token was generated before.
    frequency_penalty: float = 0.0
    #: Divides the positive and multiplies the negative logits of all tokens seen, the prompt's
    #: included (CTRL, arXiv:1909.05858).
    repetition_penalty: float | None = None
    #: Makes sampling reproducible; None draws a seed from the engine's random generator.
    seed: int | None = None
    #: Strings that end the generation. The text before the first of them is kept.
    stop: str | Sequence[str] | None = None
    #: Token ids that end the generation.
    stop_token_ids: Sequence[int] | None = None
    #: Whether the text also keeps the stop string.
    include_stop_str_in_output: bool = False
    #: Whether the generation continues after the model's own end tokens.
    ignore_eos: bool = False
    #: Maximum number of generated tokens, from 1 to 2**31 - 1; None sets no limit but
    #: max_model_len. finish_reason is "length" at either limit.
    max_tokens: int | None = 16
    #: End tokens, stop tokens and stop strings have no effect before this many generated tokens.
    #: Refused if max_model_len leaves no room for them after the prompt.
    min_tokens: int = 0
    #: Number of most likely tokens whose log-probabilities are returned for each generated token,
    #: beside the token's own. Log-probabilities are those of the model's own distribution, before
    #: any other option applies. -1 returns the whole vocabulary, if max_logprobs allows it; None
    #: returns none.
    logprobs: int | None = None
    #: Number of most likely tokens whose log-probabilities are returned for each prompt token; -1
    #: and None mean the same as for logprobs.
    prompt_logprobs: int | None = None
    #: Tokens, at most 128, whose log-probabilities are returned instead of those of the most likely
    #: tokens. logprobs must then be their number or None.
    logprob_token_ids: Sequence[int] | None = None
    #: Token id -> number added to its logit.
    logit_bias: Mapping[int, float] | None = None
    #: Strings that are never generated.
    bad_words: Sequence[str] | None = None
    #: The only tokens that may be generated; None allows all.
    allowed_token_ids: Sequence[int] | None = None
    #: Whether the text leaves special tokens out.
    skip_special_tokens: bool = True
    #: The form that the text must have. The older names guided_json, guided_regex, guided_choice
    #: and guided_grammar are accepted, too.
    structured_outputs: StructuredOutputsParams | None = None
    #: False returns token ids without text.
    detokenize: bool = True
    #: Keeps this many tokens at the end of the prompt; -1 keeps the largest number that leaves room
    #: for one generated token. None keeps all.
    truncate_prompt_tokens: int | None = None
    #: The side that truncate_prompt_tokens cuts: "left" (or None) keeps the prompt's last tokens,
    #: "right" the first.
    truncation_side: str | None = None
    #: Content of each output of the async engine. `LLM.generate` always returns final outputs.
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE

    checks: ClassVar[Checks] = _CHECKS
    aliases: ClassVar[Mapping[str, str]] = {
        "guided_decoding": "structured_outputs",
        **dict.fromkeys(_GUIDED, "structured_outputs"),
    }
    makers: ClassVar = _GUIDED
    foreign: ClassVar = COMPAT_SAMPLING

    def __post_init__(self) -> None:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                f"min_tokens is {self.min_tokens}, above max_tokens, {self.max_tokens}",
                "min_tokens",
            )
        if self.truncate_prompt_tokens == 0:
            raise InvalidRequestError(
                "truncate_prompt_tokens is 0, which leaves no prompt; it must be at least 1, or -1"
                " for max_model_len",
                "truncate_prompt_tokens",
            )
        listed = self.logprob_token_ids
        if listed is not None and self.logprobs not in (None, len(listed)):
            raise InvalidRequestError(
                f"logprobs is {self.logprobs}, but logprob_token_ids has {len(listed)} tokens, in"
                " place of the most likely ones; leave logprobs out",
                "logprobs",
            )
        if self.stop and not self.detokenize:
            raise InvalidRequestError(
                "stop has strings, which are looked for in the text, but detokenize is False; use"
                " stop_token_ids, or leave detokenize out",
                "stop",
            )

    @property
    def wants_logprobs(self) -> bool:
        """Whether generated tokens come with log-probabilities."""
        return self.logprobs is not None or self.logprob_token_ids is not None

    def clone(self) -> Self:
        """Return a copy that shares no mutable value. Raises InvalidRequestError for fields that
        don't go together."""
        return replace(self)


@answers_mistakes
@dataclass(slots=True, kw_only=True)
class BeamSearchParams(CheckedFields):
    """Options of one beam search (see `core.scheduling.beams.search`). Fields may be assigned.

    Raises InvalidRequestError (a ValueError) that names the field, its value and the bound.
    """

    #: Number of beams, and of results, which are returned best first.
    beam_width: int
    #: Maximum number of generated tokens, as in SamplingParams.
    max_tokens: int | None = 16
    #: A result's score is its log-probability / num_generated_tokens ** length_penalty. Above 0 it
    #: favours long results, below 0 short ones.
    length_penalty: float = 1.0
    #: Log-probabilities are those of softmax(logits / temperature); 0 is treated as 1.
    temperature: float = 0.0
    #: Whether a beam continues after the model's own end tokens.
    ignore_eos: bool = False

    checks: ClassVar[Checks] = _BEAM_CHECKS
    foreign: ClassVar = COMPAT_BEAMS

    def clone(self) -> Self:
        """Return a copy."""
        return replace(self)


def sampling_params_of(beams: BeamSearchParams) -> SamplingParams:
    """The sampling parameters of a beam search.

    Options that beam search lacks are switched off explicitly, since the model's own defaults could
    switch them on.
    """
    return SamplingParams(
        n=beams.beam_width,
        temperature=beams.temperature,
        max_tokens=beams.max_tokens,
        ignore_eos=beams.ignore_eos,
        top_p=1.0,
        top_k=0,
        min_p=0.0,
        repetition_penalty=1.0,
    )


@dataclass(frozen=True, slots=True)
class DecodingParams:
    """SamplingParams resolved against a model: every field has a value, and everything is in token
    ids.

    The scheduler reads max_tokens, min_tokens, end_token_ids and stop_token_ids. The sampler reads
    the other fields, and end_token_ids and stop_token_ids to suppress them before min_tokens.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    #: Seed of the row's random numbers, an unsigned integer of 64 bits.
    seed: int = 0
    min_tokens: int = 0
    #: The model's end tokens; empty under ignore_eos.
    end_token_ids: tuple[int, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    #: Number of most likely tokens to report; None reports none. With logprob_token_ids it is 0,
    #: and the log-probabilities of those tokens are reported.
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: tuple[int, ...] = ()
    logit_bias: tuple[tuple[int, float], ...] = ()
    #: Token sequences that are never generated: the last token of a sequence is suppressed when its
    #: other tokens precede it.
    bad_words: tuple[tuple[int, ...], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    #: Above 0, the row belongs to a beam search. Instead of sampling, the row takes the most likely
    #: token, and its log-probabilities list the num_beam_candidates best tokens of softmax(logits /
    #: temperature); a temperature of 0 is treated as 1.
    beam_width: int = 0
    #: See `BeamSearchParams`.
    length_penalty: float = 1.0
    #: The grammar that the tokens obey, as `text.grammars` writes it; None allows any tokens.
    grammar: str | None = None
    #: If not None, the result is a vector or scores for the prompt, and no token is generated.
    #: max_tokens is then 1, and the other fields are ignored.
    pooling: PoolingParams | None = None

    @property
    def num_beam_candidates(self) -> int:
        """Number of continuations to report for each beam: beam_width plus one for each token that
        can end the beam."""
        return self.beam_width + len(self.end_token_ids) + len(self.stop_token_ids)


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """Limits and abilities of model and engine, against which requests are checked."""

    vocab_size: int
    max_model_len: int
    end_token_ids: tuple[int, ...] = ()
    defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    #: Upper bound of a request's `logprobs` and `prompt_logprobs`.
    max_logprobs: int = 20
    #: Whether the scheduling policy reads a request's priority; if not, a request with one is
    #: refused. The same holds for reads_deadline.
    reads_priority: bool = False
    reads_deadline: bool = False
    #: Whether the model predicts tokens; if not, all requests must pool.
    generates: bool = True
    #: Token types of the model's inputs; a token of type i has i * vocab_size added to its id.
    num_token_types: int = 1
    #: How requests pool by default.
    pooling: ModelPooling = field(default_factory=ModelPooling)
    #: Maximum number of tokens of one content in a prompt, such as an image; 0 if the model takes
    #: text only.
    max_content_tokens: int = 0

    @property
    def num_token_ids(self) -> int:
        """Upper bound (exclusive) of a prompt's token ids."""
        return self.vocab_size * self.num_token_types


def resolve(
    params: SamplingParams,
    limits: ModelLimits,
    *,
    num_prompt_tokens: int,
    seed: int,
    bad_words: Sequence[Sequence[int]] = (),
    beams: BeamSearchParams | None = None,
    grammar: str | None = None,
) -> DecodingParams:
    """Fill in the options that the caller left unset, and check all against the model.

    seed: used if the params have none. bad_words: the bad_words of the params as token ids. beams:
    for a beam search; params is then `sampling_params_of(beams)`. grammar: see DecodingParams.

    Raises InvalidRequestError for token ids beyond the vocabulary, for too many logprobs, and for
    min_tokens beyond the context. `Engine.add` checks that the prompt fits.
    """
    # First, check all token ids against the vocabulary, and min_tokens against the context.
    vocab_size, defaults = limits.vocab_size, limits.defaults
    _check_vocabulary("stop_token_ids", params.stop_token_ids or (), vocab_size)
    _check_vocabulary("allowed_token_ids", params.allowed_token_ids or (), vocab_size)
    listed = tuple(dict.fromkeys(params.logprob_token_ids or ()))
    _check_vocabulary("logprob_token_ids", listed, vocab_size)
    _check_vocabulary("logit_bias", tuple(params.logit_bias or {}), vocab_size)
    num_left = limits.max_model_len - num_prompt_tokens
    if params.min_tokens > max(1, num_left):
        raise InvalidRequestError(
            f"min_tokens is {params.min_tokens}, but max_model_len, {limits.max_model_len}, leaves"
            f" room for {num_left} tokens behind the prompt's {num_prompt_tokens}; lower it",
            "min_tokens",
        )
    # Then fill in the model's defaults for options that the caller left open.
    top_k = _or_default(params.top_k, defaults.top_k)
    top_p = _or_default(params.top_p, defaults.top_p)
    temperature = _or_default(params.temperature, defaults.temperature)
    if top_p == 0:  # the likeliest token alone reaches it at any temperature
        temperature, top_p = 0.0, 1.0
    return DecodingParams(
        max_tokens=params.max_tokens if params.max_tokens is not None else max(1, num_left),
        temperature=temperature,
        top_p=top_p,
        top_k=top_k if 0 < top_k < vocab_size else 0,
        min_p=_or_default(params.min_p, defaults.min_p),
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=_or_default(params.repetition_penalty, defaults.repetition_penalty),
        seed=(seed if params.seed is None else params.seed) % SEED_LIMIT,
        min_tokens=params.min_tokens,
        end_token_ids=() if params.ignore_eos else limits.end_token_ids,
        stop_token_ids=tuple(params.stop_token_ids or ()),
        logprobs=0 if listed else _num_logprobs("logprobs", params.logprobs, limits),
        prompt_logprobs=_num_logprobs("prompt_logprobs", params.prompt_logprobs, limits),
        logprob_token_ids=listed,
        logit_bias=tuple((params.logit_bias or {}).items()),
        bad_words=tuple(tuple(word) for word in bad_words),
        allowed_token_ids=(
            None if params.allowed_token_ids is None else tuple(params.allowed_token_ids)
        ),
        beam_width=0 if beams is None else beams.beam_width,
        length_penalty=1.0 if beams is None else float(beams.length_penalty),
        grammar=grammar,
    )


def _num_logprobs(name: str, count: int | None, limits: ModelLimits) -> int | None:
    if count is None:
        return None
    whole = " (the whole vocabulary)" if count == -1 else ""
    count = limits.vocab_size if count == -1 else count
    if count > limits.max_logprobs:
        raise InvalidRequestError(
            f"{name} is {count}{whole}, above the bound of {limits.max_logprobs}; ask for fewer, or"
            f" raise max_logprobs",
            name,
        )
    return count


def _or_default(value: T | None, default: T) -> T:
    return default if value is None else value


def _check_vocabulary(name: str, token_ids: Sequence[int], vocab_size: int) -> None:
    for token_id in token_ids:
        if token_id >= vocab_size:
            raise InvalidRequestError(
                f"{name} contains {token_id}, beyond the vocabulary of {vocab_size} tokens", name
            )
