"""Sampling parameters as clients give them, and as the engine gets them.

`SamplingParams`, or `BeamSearchParams`, has what a client asks for, with the field's usual names; a
bad value is refused by name and bound when the object is made. `DecodingParams` is the same,
resolved against a model: every field has a value and everything is in token ids. Only the latter
crosses into the engine.
"""

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from quire.errors import InvalidRequestError, check_characters, did_you_mean, shown

MAX_BRANCHES = 1024
MAX_BEAM_WIDTH = 64
MAX_LENGTH_PENALTY = 5.0
MAX_STOP_STRINGS = 64
SEED_LIMIT = 1 << 64
MAX_TOKENS = (1 << 31) - 1
"""No context is so long; a larger max_tokens or min_tokens is a mistake."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """A model's own sampling options (`generation_config.json`), used where the caller set none."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


_INTEGERS: tuple[tuple[str, int, int | None], ...] = (
    ("n", 1, MAX_BRANCHES),
    ("top_k", -1, None),
    ("seed", -(SEED_LIMIT >> 1), SEED_LIMIT - 1),
    ("max_tokens", 1, MAX_TOKENS),
    ("min_tokens", 0, MAX_TOKENS),
    ("logprobs", 0, None),
    ("prompt_logprobs", 0, None),
)
_NUMBERS = (
    ("temperature", 0.0, 100.0),
    ("top_p", 0.0, 1.0),
    ("min_p", 0.0, 1.0),
    ("presence_penalty", -2.0, 2.0),
    ("frequency_penalty", -2.0, 2.0),
    ("repetition_penalty", 0.01, 100.0),
)
"""SamplingParams' fields with their lowest and highest values, both allowed but for top_p = 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Options of one generation. None in a field typed `... | None` means what its line says.

    n: parallel samples of the same prompt.
    temperature: 0 is greedy; None: the model's default, as for top_p, top_k, min_p and
        repetition_penalty.
    top_p, top_k, min_p: keep the smallest set of tokens whose probabilities reach top_p; the top_k
        most likely (0 or -1: all); those at least min_p times as likely as the most likely one.
        Applied after temperature, in the order min_p, top_k, top_p.
    presence_penalty, frequency_penalty: subtracted from the logits of tokens already generated,
        once, or once per occurrence (OpenAI's definition).
    repetition_penalty: divides positive and multiplies negative logits of all tokens seen, the
        prompt's included (CTRL, arXiv:1909.05858).
    seed: makes sampling reproducible; None draws one from the engine's own seed.
    stop: strings that end the generation; the text before the first of them is kept
        (the string too with include_stop_str_in_output).
    stop_token_ids: token ids that end the generation. ignore_eos: the model's own end tokens don't.
    max_tokens: upper limit of generated tokens, from 1 to 2**31 - 1. Generation also ends where
        max_model_len is reached; in both cases finish_reason is "length". None: max_model_len only.
    min_tokens: end tokens, stop tokens and stop strings have no effect before this many generated
        tokens. Refused if max_model_len has no room for them after the prompt.
    logprobs, prompt_logprobs: for each generated token (each prompt token), the log-probabilities
        of this many most likely tokens and of the token itself, from the model's own distribution,
        before any other option applies.
    logit_bias: token id -> number added to its logit.
    bad_words: strings that are never generated. allowed_token_ids: only these are generated.
    skip_special_tokens: leave special tokens out of the text.

    Numbers and lists of token ids may be NumPy's or torch's.
    Raises InvalidRequestError (a ValueError) that names the field, its value and the bound.
    """

    n: int = 1
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: Mapping[int, float] | None = None
    bad_words: Sequence[str] | None = None
    allowed_token_ids: Sequence[int] | None = None
    skip_special_tokens: bool = True

    def __new__(cls, *_: Any, **given: Any) -> "SamplingParams":
        _refuse_unknown(cls, given)
        return object.__new__(cls)

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_flags()
        self._normalise_lists()
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError(
                f"min_tokens is {self.min_tokens}, above max_tokens, {self.max_tokens}",
                "min_tokens",
            )

    def _check_numbers(self) -> None:
        set_field = object.__setattr__  # frozen: normalised values go in the dataclass's own way
        for name, low, high in _INTEGERS:
            set_field(self, name, _integer(name, getattr(self, name), low, high))
        for name, least, most in _NUMBERS:
            number = _number(name, getattr(self, name), least, most, above_low=name == "top_p")
            set_field(self, name, number)
        for name in ("n", "presence_penalty", "frequency_penalty", "min_tokens"):
            if getattr(self, name) is None:
                raise InvalidRequestError(f"{name} is None, but must be a number", name)

    def _check_flags(self) -> None:
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
            _flag(name, getattr(self, name))

    def _normalise_lists(self) -> None:
        stop = (self.stop,) if isinstance(self.stop, str) else self.stop
        stop = _strings("stop", stop)
        if len(stop) > MAX_STOP_STRINGS:
            raise InvalidRequestError(
                f"stop has {len(stop)} strings, above the bound of {MAX_STOP_STRINGS}", "stop"
            )
        set_field = object.__setattr__
        set_field(self, "stop", stop)
        set_field(self, "bad_words", _strings("bad_words", self.bad_words))
        set_field(self, "stop_token_ids", _token_ids("stop_token_ids", self.stop_token_ids))
        if self.allowed_token_ids is not None:
            allowed = _token_ids("allowed_token_ids", self.allowed_token_ids)
            if not allowed:
                raise InvalidRequestError(
                    "allowed_token_ids is empty, so no token could be generated; name at least one",
                    "allowed_token_ids",
                )
            set_field(self, "allowed_token_ids", allowed)
        set_field(self, "logit_bias", _logit_bias(self.logit_bias))


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchParams:
    """Options of one beam search, as `core.beam_search` describes it.

    beam_width: how many beams are followed, and how many results come, best first.
    max_tokens: a ceiling, as in SamplingParams.
    length_penalty: a result's score is its log-probability / num_generated_tokens ** it; above 0
        favours long results, below 0 short ones.
    temperature: log-probabilities are of softmax(logits / temperature); 0 counts as 1.
    ignore_eos: the model's own end tokens don't end a beam.

    Raises InvalidRequestError (a ValueError) that names the field, its value and the bound.
    """

    beam_width: int
    max_tokens: int | None = 16
    length_penalty: float = 1.0
    temperature: float = 0.0
    ignore_eos: bool = False

    def __new__(cls, *_: Any, **given: Any) -> "BeamSearchParams":
        _refuse_unknown(cls, given)
        return object.__new__(cls)

    def __post_init__(self) -> None:
        for name in ("beam_width", "length_penalty", "temperature"):
            if getattr(self, name) is None:
                raise InvalidRequestError(f"{name} is None, but must be a number", name)
        longest = MAX_LENGTH_PENALTY
        given = {
            "beam_width": _integer("beam_width", self.beam_width, 1, MAX_BEAM_WIDTH),
            "max_tokens": _integer("max_tokens", self.max_tokens, 1, MAX_TOKENS),
            "length_penalty": _number("length_penalty", self.length_penalty, -longest, longest),
            "temperature": _number("temperature", self.temperature, 0.0, 100.0),
        }
        for name, value in given.items():
            object.__setattr__(self, name, value)
        _flag("ignore_eos", self.ignore_eos)


def _refuse_unknown(kind: type, given: Mapping[str, Any]) -> None:
    known = [entry.name for entry in fields(kind)]
    for name in given:
        if name not in known:
            raise InvalidRequestError(
                f"{kind.__name__} has no option {name}{did_you_mean(name, known)}", name
            )


def sampling_params_of(beams: BeamSearchParams) -> SamplingParams:
    """What a beam search has in common with sampling; all that it lacks is switched off, also where
    the model's own defaults would switch it on."""
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
    """SamplingParams resolved against a model: every field a value, everything in token ids.

    What the scheduler reads: max_tokens, min_tokens, end_token_ids, stop_token_ids. The sampler
    reads the rest, and the two kinds of end tokens to suppress them before min_tokens.

    seed: 64 unsigned bits. end_token_ids: the model's end tokens, empty under ignore_eos.
    bad_words: token sequences whose last token is suppressed where the others precede it.
    beam_width: above 0, the row searches beams: instead of sampling, it takes the most likely
        token, and its log-probabilities, of softmax(logits / temperature), hold the
        num_beam_candidates best (a temperature of 0 counts as 1).
    length_penalty: see `core.beam_search`.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    min_tokens: int = 0
    end_token_ids: tuple[int, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    beam_width: int = 0
    length_penalty: float = 1.0

    @property
    def num_beam_candidates(self) -> int:
        """Continuations of one beam to choose from: enough that all that end leave beam_width."""
        return self.beam_width + len(self.end_token_ids) + len(self.stop_token_ids)


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What `resolve` needs to know of the model and the engine.

    max_logprobs: the most `logprobs` or `prompt_logprobs` that one request may ask for.
    reads_priority, reads_deadline: whether the scheduling policy does; a request that gives
        one that the policy does not read is refused.
    """

    vocab_size: int
    max_model_len: int
    end_token_ids: tuple[int, ...] = ()
    defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    max_logprobs: int = 20
    reads_priority: bool = False
    reads_deadline: bool = False


def resolve(
    params: SamplingParams,
    limits: ModelLimits,
    *,
    num_prompt_tokens: int,
    seed: int,
    bad_words: Sequence[Sequence[int]] = (),
    beams: BeamSearchParams | None = None,
) -> DecodingParams:
    """Fill in what the caller left open and check what only the model can tell.

    seed: used where the params have none. bad_words: those of the params as token ids.
    beams: of a beam search, whose params are `sampling_params_of` it.
    Raises InvalidRequestError for token ids beyond the vocabulary, for too many logprobs and for
    min_tokens that the context has no room for. Does not check that the prompt fits (`Engine.add`
    does).
    """
    vocab_size, defaults = limits.vocab_size, limits.defaults
    _check_vocabulary("stop_token_ids", params.stop_token_ids or (), vocab_size)
    _check_vocabulary("allowed_token_ids", params.allowed_token_ids or (), vocab_size)
    _check_vocabulary("logit_bias", tuple(params.logit_bias or {}), vocab_size)
    for name in ("logprobs", "prompt_logprobs"):
        count = getattr(params, name)
        if count is not None and count > limits.max_logprobs:
            raise InvalidRequestError(
                f"{name} is {count}, above the bound of {limits.max_logprobs}", name
            )
    num_left = limits.max_model_len - num_prompt_tokens
    if params.min_tokens > max(1, num_left):
        raise InvalidRequestError(
            f"min_tokens is {params.min_tokens}, but max_model_len, {limits.max_model_len}, leaves"
            f" room for {num_left} tokens behind the prompt's {num_prompt_tokens}; lower it",
            "min_tokens",
        )
    top_k = _or_default(params.top_k, defaults.top_k)
    return DecodingParams(
        max_tokens=params.max_tokens if params.max_tokens is not None else max(1, num_left),
        temperature=_or_default(params.temperature, defaults.temperature),
        top_p=_or_default(params.top_p, defaults.top_p),
        top_k=top_k if 0 < top_k < vocab_size else 0,
        min_p=_or_default(params.min_p, defaults.min_p),
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        repetition_penalty=_or_default(params.repetition_penalty, defaults.repetition_penalty),
        seed=(seed if params.seed is None else params.seed) % SEED_LIMIT,
        min_tokens=params.min_tokens,
        end_token_ids=() if params.ignore_eos else limits.end_token_ids,
        stop_token_ids=tuple(params.stop_token_ids or ()),
        logprobs=params.logprobs,
        prompt_logprobs=params.prompt_logprobs,
        logit_bias=tuple((params.logit_bias or {}).items()),
        bad_words=tuple(tuple(word) for word in bad_words),
        allowed_token_ids=(
            None if params.allowed_token_ids is None else tuple(params.allowed_token_ids)
        ),
        beam_width=0 if beams is None else beams.beam_width,
        length_penalty=1.0 if beams is None else float(beams.length_penalty),
    )


def _or_default(value: T | None, default: T) -> T:
    return default if value is None else value


def _bounds(low: float | None, high: float | None, above_low: bool) -> str:
    parts = []
    if low is not None:
        parts.append(f"above {low:g}" if above_low else f"at least {low:g}")
    if high is not None:
        parts.append(f"at most {high:g}")
    return " and ".join(parts)


def as_python(value: Any) -> Any:
    """A number or an array of NumPy or torch as Python's own; everything else as it is."""
    to_list = getattr(value, "tolist", None)
    return value if to_list is None else to_list()


def whole_number(value: Any) -> int | None:
    """`value` as an int, if it is a whole number of any type; True and False are none."""
    plain = as_python(value)
    if isinstance(plain, bool):
        return None
    try:
        return int(operator.index(plain))
    except TypeError:
        return None


def _number(
    name: str, value: Any, low: float, high: float, *, above_low: bool = False
) -> float | None:
    """`value` as Python has it. Raises InvalidRequestError for what is no number within bounds."""
    if value is None:
        return None
    plain = as_python(value)
    if isinstance(plain, bool) or not isinstance(plain, (int, float)):
        raise InvalidRequestError(f"{name} is {shown(value)}, but must be a number", name)
    too_low = plain <= low if above_low else plain < low
    if too_low or plain > high or math.isnan(plain):
        raise InvalidRequestError(
            f"{name} is {plain!r}, but must be {_bounds(low, high, above_low)}", name
        )
    return plain


def _integer(name: str, value: Any, low: int, high: int | None) -> int | None:
    """As `_number`."""
    if value is None:
        return None
    whole = whole_number(value)
    if whole is None:
        raise InvalidRequestError(f"{name} is {shown(value)}, but must be a whole number", name)
    if whole < low or (high is not None and whole > high):
        bound = f"at least {low}" + (f" and at most {high}" if high is not None else "")
        raise InvalidRequestError(f"{name} is {whole!r}, but must be {bound}", name)
    return whole


def _flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise InvalidRequestError(f"{name} is {shown(value)}, but must be True or False", name)


def _strings(name: str, values: Any) -> tuple[str, ...]:
    if values is None:
        return ()
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise InvalidRequestError(f"{name} is {values!r}, but must be a list of strings", name)
    for value in values:
        if not isinstance(value, str) or not value:
            raise InvalidRequestError(
                f"{name} contains {shown(value)}, but each must be a non-empty string", name
            )
        check_characters(value, name)
    return tuple(values)


def _token_ids(name: str, values: Any) -> tuple[int, ...]:
    listed = () if values is None else as_python(values)
    if isinstance(listed, (str, bytes)) or not isinstance(listed, Sequence):
        raise InvalidRequestError(f"{name} is {values!r}, but must be a list of token ids", name)
    found = []
    for value in listed:
        token_id = whole_number(value)
        if token_id is None or token_id < 0:
            raise InvalidRequestError(
                f"{name} contains {shown(value)}, but each must be a token id (0 or more)", name
            )
        found.append(token_id)
    return tuple(found)


def _logit_bias(values: Any) -> Mapping[int, float]:
    if values is None:
        return {}
    if not isinstance(values, Mapping):
        raise InvalidRequestError(
            f"logit_bias is {values!r}, but must map token ids to numbers", "logit_bias"
        )
    biases: dict[int, float] = {}
    for key, value in values.items():
        token_id = whole_number(key)
        if token_id is None or token_id < 0:
            raise InvalidRequestError(
                f"logit_bias has the key {shown(key)}, but keys must be token ids", "logit_bias"
            )
        bias = _number("logit_bias", value, -100.0, 100.0)
        if bias is None:
            raise InvalidRequestError(
                f"logit_bias of token {token_id} is None, but must be a number", "logit_bias"
            )
        biases[token_id] = bias
    return biases


def _check_vocabulary(name: str, token_ids: Sequence[int], vocab_size: int) -> None:
    for token_id in token_ids:
        if token_id >= vocab_size:
            raise InvalidRequestError(
                f"{name} contains {token_id}, beyond the vocabulary of {vocab_size} tokens", name
            )
