"""Sampling parameters as clients give them, and as the engine gets them.

`SamplingParams`, or `BeamSearchParams`, has what a client asks for, with the field's usual names; a
bad value is refused by name and bound when the object is made. `DecodingParams` is the same,
resolved against a model: every field has a value and everything is in token ids. Only the latter
crosses into the engine.
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
MAX_LENGTH_PENALTY = 5.0
SEED_LIMIT = 1 << 64
MAX_TOKENS = (1 << 31) - 1
"""No context is so long; a larger max_tokens or min_tokens is a mistake."""

T = TypeVar("T")

_GUIDED: Mapping[str, Callable[[Any], StructuredOutputsParams]] = {
    "guided_json": lambda value: StructuredOutputsParams(json=value),
    "guided_regex": lambda value: StructuredOutputsParams(regex=value),
    "guided_choice": lambda value: StructuredOutputsParams(choice=value),
    "guided_grammar": lambda value: StructuredOutputsParams(grammar=value),
}
"""Older names for one kind of structured outputs each."""


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """A model's own sampling options (`generation_config.json`), used where the caller set none."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


class RequestOutputKind(Enum):
    """What each output of a stream has: all so far, what is new, or nothing before the end."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


Checks = Mapping[str, Callable[[Any], Any]]


def _integers(**bounds: tuple[int, int | None, bool]) -> Checks:
    """Field -> its lowest and highest value, and whether it may be None."""
    return {
        name: partial(integer, name, low=low, high=high, is_optional=is_optional)
        for name, (low, high, is_optional) in bounds.items()
    }


def _numbers(**bounds: tuple[float, float, bool]) -> Checks:
    return {
        name: partial(number, name, low=low, high=high, is_optional=is_optional)
        for name, (low, high, is_optional) in bounds.items()
    }


def _flags(*names: str) -> Checks:
    return {name: partial(flag, name) for name in names}


_CHECKS: Checks = {
    **_integers(
        n=(1, MAX_BRANCHES, False),
        top_k=(-1, None, True),
        seed=(-(SEED_LIMIT >> 1), SEED_LIMIT - 1, True),
        max_tokens=(1, MAX_TOKENS, True),
        min_tokens=(0, MAX_TOKENS, False),
        logprobs=(-1, None, True),
        prompt_logprobs=(-1, None, True),
        truncate_prompt_tokens=(-1, MAX_TOKENS, True),
    ),
    **_numbers(
        temperature=(0.0, 100.0, True),
        top_p=(0.0, 1.0, True),
        min_p=(0.0, 1.0, True),
        presence_penalty=(-2.0, 2.0, False),
        frequency_penalty=(-2.0, 2.0, False),
        repetition_penalty=(0.01, 100.0, True),
    ),
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
"""SamplingParams' fields. Their lowest and highest values are both allowed."""

_BEAM_CHECKS: Checks = {
    **_integers(beam_width=(1, MAX_BEAM_WIDTH, False), max_tokens=(1, MAX_TOKENS, True)),
    **_numbers(
        length_penalty=(-MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY, False),
        temperature=(0.0, 100.0, False),
    ),
    **_flags("ignore_eos"),
}


@answers_mistakes
@dataclass(slots=True, kw_only=True)
class SamplingParams(CheckedFields):
    """Options of one generation. None in a field typed `... | None` means what its line says.

    Fields may be assigned; a value is checked as it is when the object is made, and fields together
    where a request is made. That takes a copy: a running request does not change any more.

    n: parallel samples of the same prompt.
    temperature: 0 is greedy; None: the model's default, as for top_p, top_k, min_p and
        repetition_penalty.
    top_p, top_k, min_p: keep the smallest set of tokens whose probabilities reach top_p (0: the
        likeliest token, as with a temperature of 0); the top_k most likely (0 or -1: all); those at
        least min_p times as likely as the most likely one. Applied after temperature, in the order
        min_p, top_k, top_p.
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
        before any other option applies. -1: of the whole vocabulary, where max_logprobs allows it.
    logprob_token_ids: in place of the most likely tokens of each generated one, the
        log-probabilities of exactly these, at most 128. logprobs is then their number or None.
    logit_bias: token id -> number added to its logit.
    bad_words: strings that are never generated. allowed_token_ids: only these are generated.
    skip_special_tokens: leave special tokens out of the text.
    detokenize: False: make no text, only token ids.
    truncate_prompt_tokens: keep the last so many tokens of the prompt; -1: as many as leave
        room for one more. truncation_side: "right": keep the first ones instead; None: as "left".
    output_kind: what each output of the async engine has; `LLM.generate` has the final ones.
    structured_outputs: what the text must look like; see StructuredOutputsParams. The older names
        guided_json, guided_regex, guided_choice and guided_grammar are understood.

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
    logprob_token_ids: Sequence[int] | None = None
    logit_bias: Mapping[int, float] | None = None
    bad_words: Sequence[str] | None = None
    allowed_token_ids: Sequence[int] | None = None
    skip_special_tokens: bool = True
    structured_outputs: StructuredOutputsParams | None = None
    detokenize: bool = True
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
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
        """A copy that shares nothing which could be changed. Raises InvalidRequestError for fields
        that don't go together."""
        return replace(self)


@answers_mistakes
@dataclass(slots=True, kw_only=True)
class BeamSearchParams(CheckedFields):
    """Options of one beam search, as `core.beam_search` describes it. Fields may be assigned.

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

    checks: ClassVar[Checks] = _BEAM_CHECKS
    foreign: ClassVar = COMPAT_BEAMS

    def clone(self) -> Self:
        """A copy."""
        return replace(self)


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

    logprobs: None: none; else of so many best tokens, or of logprob_token_ids, where there are any.
    seed: 64 unsigned bits. end_token_ids: the model's end tokens, empty under ignore_eos.
    bad_words: token sequences whose last token is suppressed where the others precede it.
    beam_width: above 0, the row searches beams: instead of sampling, it takes the most likely
        token, and its log-probabilities, of softmax(logits / temperature), hold the
        num_beam_candidates best (a temperature of 0 counts as 1).
    length_penalty: see `core.beam_search`.
    grammar: what the tokens must obey, as `text.grammars` writes it; None: nothing.
    pooling: no token is generated; the result is a vector, or scores, of the prompt. max_tokens is
        then 1 and nothing else is read.
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
    logprob_token_ids: tuple[int, ...] = ()
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    beam_width: int = 0
    length_penalty: float = 1.0
    grammar: str | None = None
    pooling: PoolingParams | None = None

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
    generates: whether it predicts tokens; if not, requests are to pool.
    num_token_types: of the model's inputs: a token of type i has i * vocab_size added to its id.
    pooling: how a request pools that says nothing of it.
    """

    vocab_size: int
    max_model_len: int
    end_token_ids: tuple[int, ...] = ()
    defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    max_logprobs: int = 20
    reads_priority: bool = False
    reads_deadline: bool = False
    generates: bool = True
    num_token_types: int = 1
    pooling: ModelPooling = field(default_factory=ModelPooling)

    @property
    def num_token_ids(self) -> int:
        """A prompt's token ids are below this."""
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
    """Fill in what the caller left open and check what only the model can tell.

    seed: used where the params have none. bad_words: those of the params as token ids.
    beams: of a beam search, whose params are `sampling_params_of` it. grammar: see DecodingParams.
    Raises InvalidRequestError for token ids beyond the vocabulary, for too many logprobs and for
    min_tokens that the context has no room for. Does not check that the prompt fits (`Engine.add`
    does).
    """
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
    top_k = _or_default(params.top_k, defaults.top_k)
    top_p = _or_default(params.top_p, defaults.top_p)
    temperature = _or_default(params.temperature, defaults.temperature)
    if top_p == 0:  # the likeliest token alone reaches it, whatever the temperature
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
