"""Turns prompts and sampling parameters into tokenized, checked requests for the engine."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import countOf
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

from quire.core.adapters import AdapterRef, LoRARequest
from quire.core.content_spans import check_content_spans
from quire.core.memory.prefix_cache import PUBLIC_DOMAIN
from quire.core.request import NO_GENERATION, Request, check_prediction, check_prompt
from quire.core.sampling_checks import as_python, flag, whole_number
from quire.core.sampling_params import (
    BeamSearchParams,
    DecodingParams,
    ModelLimits,
    SamplingParams,
    resolve,
)
from quire.core.structured_outputs import StructuredOutputsParams
from quire.errors import InvalidRequestError, check_characters, shown
from quire.images.placing import NO_IMAGES, PromptImages
from quire.text.tokenizer import Tokenizer

MAX_NAME_LENGTH = 256
MAX_BAD_WORD_CELLS = 1 << 17
"""Limit of bad words: the number of their tokenized forms times the number of tokens in the longest
form. At every step, a branch compares this many tokens with its output while all other branches
wait."""

OPTION_NAMES = ("priority", "tenant", "cache_salt", "deadline_s", "speculation_history")


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """Options of a request that determine its place in the queue, its tenant and its cached
    prefixes.

    Raises InvalidRequestError, which names the field.
    """

    #: Requests with smaller values go first under the priority policy. Other policies refuse all
    #: values but 0.
    priority: int = 0
    #: Name of the tenant, for fair sharing, the memory report and the cache: prefixes are shared
    #: only within a tenant.
    tenant: str = ""
    #: Prefixes are shared only among requests with the same salt.
    cache_salt: str = ""
    #: Seconds after its arrival by which the request should have ended, for the deadline policy.
    deadline_s: float | None = None
    #: Whether all tenants may use the request's cached prefixes.
    is_public: bool = False
    #: With speculation "history": whether drafts are taken from earlier answers of the same tenant
    #: and salt, and this answer is kept for later requests. It changes no output.
    speculation_history: bool = True

    def __post_init__(self) -> None:
        priority = whole_number(self.priority)
        if priority is None:
            raise InvalidRequestError(
                f"priority is {self.priority!r}, but must be a whole number", "priority"
            )
        object.__setattr__(self, "priority", priority)
        for name in ("tenant", "cache_salt"):
            value = getattr(self, name)
            if not isinstance(value, str) or len(value) > MAX_NAME_LENGTH:
                raise InvalidRequestError(
                    f"{name} is {value!r:.80}, but must be a text of at most {MAX_NAME_LENGTH}"
                    " characters",
                    name,
                )
            check_characters(value, name)
        given: Any = as_python(self.deadline_s)
        if given is not None and (
            isinstance(given, bool) or not isinstance(given, (int, float)) or not given > 0
        ):
            raise InvalidRequestError(
                f"deadline_s is {given!r}, but must be a number of seconds above 0", "deadline_s"
            )
        object.__setattr__(self, "deadline_s", given)
        shares = flag("speculation_history", self.speculation_history)
        object.__setattr__(self, "speculation_history", shares)

    @property
    def cache_domain(self) -> str:
        """The name of the cache domain. Different (tenant, salt) pairs have different names."""
        if self.is_public:
            return PUBLIC_DOMAIN
        return f"{len(self.tenant)}:{self.tenant}{self.cache_salt}"


NO_OPTIONS = RequestOptions()


def check_priority(options: RequestOptions, limits: ModelLimits) -> None:
    """Raises InvalidRequestError for a priority that the scheduling policy would ignore."""
    if options.priority and not limits.reads_priority:
        raise InvalidRequestError(
            f"priority is {options.priority}, but the engine's scheduling policy reads no"
            " priorities; leave it out, or start the engine with"
            " scheduling_policy='priority' (--scheduling-policy priority)",
            "priority",
        )


class PromptInput(NamedTuple):
    """A parsed prompt of the offline API."""

    prompt: str | list[int]
    options: RequestOptions = NO_OPTIONS
    adapter: LoRARequest | None = None
    #: The text, or the tokens, that the caller expects to get; None if it expects nothing.
    prediction: str | list[int] | None = None
    #: Images and videos that were not read yet, each with its place in the call for errors and with
    #: whether it is a video: URLs, pictures of Pillow, arrays, or frames of these.
    pictures: tuple[tuple[str, Any, bool], ...] = ()
    #: Settings that replace those of the processor of the pictures.
    picture_settings: Mapping[str, Any] = MappingProxyType({})
    #: Makes the token ids from the pictures' placeholders and the texts that replace them, in place
    #: of `prompt`; None if `prompt` has placeholders.
    render: Callable[[Sequence[tuple[str, str]]], list[int]] | None = None
    #: The images in a prompt of token ids.
    images: PromptImages = NO_IMAGES


CompileGrammar: TypeAlias = Callable[[str, str], object]
"""Compiles a grammar for a cache domain to check that it is supported, which takes milliseconds or
much longer. Raises InvalidRequestError, which names the unsupported part."""


class InputProcessor:
    """Makes requests for one model. May be used by any number of threads."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        limits: ModelLimits,
        compile_grammar: CompileGrammar | None = None,
    ) -> None:
        """Without a `tokenizer` only token ids are accepted, without `compile_grammar` no
        grammars."""
        self._tokenizer = tokenizer
        self._limits = limits
        self._compile = compile_grammar
        #: The last list of bad words and its token ids. The prompts of one call share the list.
        self._last_words: tuple[Sequence[str], list[list[int]]] = ((), [])
        #: The last structured_outputs and the grammar made from them.
        self._last_format: tuple[StructuredOutputsParams | None, str | None] = (None, None)

    def make_request(
        self,
        request_id: str,
        prompt: str | Sequence[int],
        params: SamplingParams,
        *,
        seed: int,
        options: RequestOptions = NO_OPTIONS,
        beams: BeamSearchParams | None = None,
        grammar: str | None = None,
        adapter: AdapterRef | None = None,
    ) -> Request:
        """Tokenize, check and resolve one prompt.

        `seed` is used if the params have none. `beams` are the parameters of a beam search, or
        None; with them, `params` is `sampling_params_of(beams)`. `grammar` is the result of
        `prepare_grammar`; None makes it from params.structured_outputs. `adapter` is the engine's
        reference to the adapter.

        Raises InvalidRequestError. `Engine.add` checks whether there are enough KV blocks.
        """
        # First, refuse requests that the engine can't serve.
        check_priority(options, self._limits)
        if not self._limits.generates:
            raise InvalidRequestError(NO_GENERATION)
        # Then tokenize the prompt and all texts in the params, such as stop strings and bad words.
        token_ids = self._truncated(self.tokenize(prompt), params)
        check_prompt(token_ids, self._limits)
        if grammar is None:
            grammar = self.prepare_grammar(params.structured_outputs, options.cache_domain)
        decoding = self.resolve(params, len(token_ids), seed, beams, grammar)
        return Request(
            request_id,
            token_ids,
            decoding,
            params.n,
            options.priority,
            options.cache_domain,
            options.tenant,
            options.deadline_s,
            adapter=adapter,
            speculation_history=options.speculation_history,
        )

    def with_images(self, request: Request, images: PromptImages) -> Request:
        """The request with the images of its prompt. Raises InvalidRequestError for images that the
        model does not take, and if the prompt was cut."""
        if not images.spans:
            return request
        if len(request.prompt_token_ids) < images.num_prompt_tokens:
            raise InvalidRequestError(
                "truncate_prompt_tokens would cut the prompt, which has images and"
                f" {images.num_prompt_tokens} tokens; leave it out, or send less",
                "truncate_prompt_tokens",
            )
        check_content_spans(images.spans, len(request.prompt_token_ids), self._limits)
        images = images.in_domain(request.cache_domain)
        return replace(request, content_spans=images.spans, contents=images.contents)

    def with_prediction(self, request: Request, prediction: str | Sequence[int] | None) -> Request:
        """The request with the answer that its caller expects, from which drafts are proposed.
        Raises InvalidRequestError, which names `prediction`."""
        if not prediction:
            return request
        if request.params.beam_width:
            raise InvalidRequestError(
                "prediction is set, but a beam search can't use it; leave it out", "prediction"
            )
        return replace(request, prediction_token_ids=self.encode_prediction(prediction))

    def encode_prediction(self, prediction: str | Sequence[int]) -> tuple[int, ...]:
        """The checked tokens of an expected answer. Raises InvalidRequestError, which names
        `prediction`."""
        if isinstance(prediction, str):
            if self._tokenizer is None:
                raise InvalidRequestError(
                    "prediction is text, but the engine runs without a tokenizer; give token ids",
                    "prediction",
                )
            check_characters(prediction, "prediction")
            # Texts with more characters than any prediction has are refused untokenized.
            if len(prediction) > self._limits.max_model_len * self._tokenizer.longest_token_bytes:
                raise InvalidRequestError(
                    f"the prediction has {len(prediction)} characters, more than the tokens of any"
                    f" answer hold (max_model_len is {self._limits.max_model_len}); shorten it",
                    "prediction",
                )
            prediction = self._tokenizer.encode_continuation(prediction)
        check_prediction(prediction, self._limits)
        return tuple(prediction)

    def resolve(
        self,
        params: SamplingParams,
        num_prompt_tokens: int,
        seed: int,
        beams: BeamSearchParams | None = None,
        grammar: str | None = None,
    ) -> DecodingParams:
        """Resolve the params of one prompt. Arguments and errors are those of `make_request`."""
        if params.stop and self._tokenizer is None:
            raise InvalidRequestError(
                "stop strings need a tokenizer, but the engine has none; use stop_token_ids",
                "stop",
            )
        if grammar is None:
            grammar = self.prepare_grammar(params.structured_outputs)
        return resolve(
            params,
            self._limits,
            num_prompt_tokens=num_prompt_tokens,
            seed=seed,
            bad_words=self.prepare_bad_words(params.bad_words or ()),
            beams=beams,
            grammar=grammar,
        )

    def tokenize(self, prompt: str | Sequence[int]) -> list[int]:
        """The token ids of a text, with its special tokens, or the given token ids."""
        if isinstance(prompt, str):
            if self._tokenizer is None:
                raise InvalidRequestError(
                    "the prompt is text, but the engine runs without a tokenizer; give"
                    ' {"prompt_token_ids": [...]}',
                    "prompt",
                )
            return self._tokenizer.encode(prompt)
        return list(prompt)

    def _truncated(self, token_ids: list[int], params: SamplingParams) -> list[int]:
        """The part of a prompt that the params keep; see SamplingParams."""
        limit, longest = params.truncate_prompt_tokens, self._limits.max_model_len
        if limit is None:
            return token_ids
        if limit > longest:
            raise InvalidRequestError(
                f"truncate_prompt_tokens is {limit}, above max_model_len, {longest}; lower it, or"
                " give -1",
                "truncate_prompt_tokens",
            )
        num_kept = longest - 1 if limit == -1 else limit
        return token_ids[:num_kept] if params.truncation_side == "right" else token_ids[-num_kept:]

    def prepare_grammar(
        self, wanted: StructuredOutputsParams | None, domain: str = ""
    ) -> str | None:
        """The grammar of a structured output, after checking that it compiles for a cache domain.
        The grammar is remembered for further calls with the same object. Raises
        InvalidRequestError, which names the unsupported part."""
        if wanted is None:
            return None
        known, grammar = self._last_format  # read once, since another thread may change it
        if known is not wanted:
            from quire.text.grammars.grammar_text import grammar_of  # 20 ms of the start

            if self._tokenizer is None or self._compile is None:
                raise InvalidRequestError(
                    "structured_outputs need a tokenizer, but the engine has none; leave them out",
                    "structured_outputs",
                )
            grammar = grammar_of(wanted)
            self._compile(grammar, domain)
            self._last_format = (wanted, grammar)
        return grammar

    def prepare_bad_words(self, words: Sequence[str]) -> list[list[int]]:
        """The token ids of bad words in all their forms. The ids are remembered for further calls
        with the same list object, since tokenizing thousands of words takes long. Raises
        InvalidRequestError."""
        if not words:
            return []
        if self._tokenizer is None:
            raise InvalidRequestError(
                "bad_words need a tokenizer, but the engine has none; use logit_bias",
                "bad_words",
            )
        known, found = self._last_words  # read once, since another thread may change it
        if known is not words:  # the prompts of one call share one list
            found = [ids for word in words for ids in self._tokenizer.encode_bad_word(word)]
            num_cells = len(found) * max(map(len, found))
            if num_cells > MAX_BAD_WORD_CELLS:
                raise InvalidRequestError(
                    f"bad_words has {len(words)} words, and {max(map(len, found))} tokens in the"
                    f" longest, too much to search for at each step; send fewer or shorter words",
                    "bad_words",
                )
            self._last_words = (words, found)
        return found


def read_prompt(prompt: Any) -> PromptInput:
    """Parse one prompt of the offline API: a text, {"prompt": text} or {"prompt_token_ids": [...]}.
    A dict may also have multi_modal_data, mm_processor_kwargs, prediction, priority, tenant,
    cache_salt, deadline_s and speculation_history, and vLLM's multi_modal_uuids, which change
    nothing."""
    if isinstance(prompt, str):
        check_characters(prompt, "prompt")
        return PromptInput(prompt)
    if isinstance(prompt, Mapping):
        names = ("prompt", "prompt_token_ids", "prediction", "multi_modal_data")
        foreign = ("multi_modal_uuids", "mm_processor_kwargs")
        unknown = set(prompt) - {*names, *foreign, *OPTION_NAMES}
        if unknown:
            raise InvalidRequestError(
                f"a prompt has the unknown key {sorted(unknown)[0]!r}; known are"
                f" {', '.join(map(repr, (*names, *OPTION_NAMES)))}",
                "prompt",
            )
        options = RequestOptions(**{name: prompt[name] for name in OPTION_NAMES if name in prompt})
        prediction = read_prediction(prompt.get("prediction"))
        pictures = _read_pictures(prompt.get("multi_modal_data"))
        _check_uuids(prompt.get("multi_modal_uuids"), pictures)
        settings = read_picture_settings(prompt.get("mm_processor_kwargs"))
        more = (options, None, prediction, pictures, settings)
        token_ids = as_python(prompt.get("prompt_token_ids"))
        if isinstance(token_ids, Sequence) and not isinstance(token_ids, (str, bytes)):
            return PromptInput(_whole_numbers(token_ids), *more)
        if token_ids is None and isinstance(prompt.get("prompt"), str):
            check_characters(prompt["prompt"], "prompt")
            return PromptInput(str(prompt["prompt"]), *more)
    raise InvalidRequestError(
        f'a prompt is {prompt!r:.80}, but must be text or {{"prompt_token_ids": [...]}}', "prompt"
    )


def read_picture_settings(given: Any) -> Mapping[str, Any]:
    """The `picture_settings` in mm_processor_kwargs of a call or prompt; empty for None."""
    settings = {} if given is None else given
    if not isinstance(settings, Mapping) or not all(isinstance(name, str) for name in settings):
        raise InvalidRequestError(
            f"mm_processor_kwargs is {shown(settings)}, but must be an object with the names of"
            " settings",
            "mm_processor_kwargs",
        )
    return settings


def _read_pictures(given: Any) -> tuple[tuple[str, Any, bool], ...]:
    """The `pictures` in vLLM's multi_modal_data, which has one or a list under "image" and under
    "video"."""
    if given is None:
        return ()
    if not isinstance(given, Mapping):
        raise InvalidRequestError(
            f'multi_modal_data is {shown(given)}, but must be {{"image": ...}}', "multi_modal_data"
        )
    for name, value in given.items():
        is_empty = value is None or (isinstance(value, (list, tuple)) and not value)
        if name not in ("image", "video") and not is_empty:
            raise InvalidRequestError(
                f"multi_modal_data has {name!r:.80}, but of media only images and videos are read;"
                " leave it out",
                "multi_modal_data",
            )
    images, videos = given.get("image"), given.get("video")
    if not isinstance(images, (list, tuple)):
        images = () if images is None else (images,)
    if videos is None or _is_one_video(videos):
        videos = () if videos is None else (videos,)
    if any(each is None for each in (*images, *videos)):
        raise InvalidRequestError(
            "multi_modal_data has None for an image; give the image, which is not encoded again if"
            " its embeddings are cached",
            "multi_modal_data",
        )
    listed = [*((each, False) for each in images), *((each, True) for each in videos)]
    return tuple((f"multi_modal_data[{at}]", *each) for at, each in enumerate(listed))


def _is_one_video(given: Any) -> bool:
    """Whether it is one video, not a list of them: a URL, an array, a list of frames, or one of
    these in a tuple with its fields."""
    if not isinstance(given, (list, tuple)):
        return True
    if len(given) == 2 and isinstance(given[1], Mapping):
        return True
    first = given[0] if given else []
    return not isinstance(first, (list, tuple, str, bytes)) and getattr(first, "ndim", 0) != 4


def _check_uuids(given: Any, pictures: Sequence[tuple[str, Any, bool]]) -> None:
    """Check vLLM's names of images and videos, which are not used here: these are named by their
    pixels."""
    if given is None:
        return
    if not isinstance(given, Mapping) or set(given) - {"image", "video"}:
        raise _wrong_uuids(given)
    for kind in ("image", "video"):
        named = given.get(kind, [])
        listed = named if isinstance(named, (list, tuple)) else [named]
        if not all(isinstance(each, str | None) for each in listed):
            raise _wrong_uuids(given)
        count = sum(is_video == (kind == "video") for _, _, is_video in pictures)
        if kind in given and len(listed) != count:
            raise InvalidRequestError(
                f"multi_modal_uuids names {len(listed)} {kind}s, but multi_modal_data has {count};"
                f" give each {kind}, which is not encoded again if its embeddings are cached",
                "multi_modal_uuids",
            )


def _wrong_uuids(given: Any) -> InvalidRequestError:
    return InvalidRequestError(
        f'multi_modal_uuids is {shown(given)}, but must be {{"image": ..., "video": ...}} with a'
        " text or a list of texts each",
        "multi_modal_uuids",
    )


def read_prediction(given: Any) -> str | list[int] | None:
    """Parse the prediction of a prompt: a text, or a list of token ids. Raises
    InvalidRequestError."""
    if given is None or isinstance(given, str):
        return given
    listed = as_python(given)
    if isinstance(listed, Sequence) and not isinstance(listed, bytes):
        token_ids = _whole_numbers(listed)
        if countOf(map(type, token_ids), int) == len(token_ids):
            return token_ids
    raise InvalidRequestError(
        f"a prediction is {given!r:.80}, but must be text or a list of token ids", "prediction"
    )


def _whole_numbers(token_ids: Sequence[Any]) -> list[int]:
    """Convert whole numbers of any type to int. Other values are returned as they are, and refused
    later."""
    if countOf(map(type, token_ids), int) == len(token_ids):
        return list(token_ids)
    whole = [(token_id, whole_number(token_id)) for token_id in token_ids]
    return [given if found is None else found for given, found in whole]


def with_adapters(prompts: Sequence[PromptInput], given: Any) -> list[PromptInput]:
    """Combine prompts with their lora_request: one adapter for all, a list with one adapter or None
    for each prompt, or None. Raises InvalidRequestError."""
    if given is None:
        return list(prompts)
    adapters = [given] * len(prompts) if isinstance(given, LoRARequest) else given
    if not isinstance(adapters, Sequence) or isinstance(adapters, (str, bytes)):
        raise InvalidRequestError(
            f"lora_request is {given!r:.80}, but must be a LoRARequest, or a list with one or None"
            " for each prompt",
            "lora_request",
        )
    if len(adapters) != len(prompts):
        raise InvalidRequestError(
            f"there are {len(prompts)} prompts, but lora_request has {len(adapters)}; give one, or"
            " one or None for each",
            "lora_request",
        )
    for adapter in adapters:
        if adapter is not None and not isinstance(adapter, LoRARequest):
            raise InvalidRequestError(
                f"lora_request contains {adapter!r:.80}, but each must be a LoRARequest or None",
                "lora_request",
            )
    pairs = zip(prompts, adapters, strict=True)
    return [prompt._replace(adapter=adapter) for prompt, adapter in pairs]
