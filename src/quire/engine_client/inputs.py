"""From prompts and parameters to requests in token ids."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import countOf
from typing import Any, NamedTuple, TypeAlias

from quire.core.adapters import AdapterRef, LoRARequest
from quire.core.memory.prefix_cache import PUBLIC_DOMAIN
from quire.core.request import NO_GENERATION, Request, check_prompt
from quire.core.sampling_checks import as_python, whole_number
from quire.core.sampling_params import (
    BeamSearchParams,
    DecodingParams,
    ModelLimits,
    SamplingParams,
    resolve,
)
from quire.core.structured_outputs import StructuredOutputsParams
from quire.errors import InvalidRequestError, check_characters
from quire.text.grammars.front import grammar_of
from quire.text.tokenizer import Tokenizer

MAX_NAME_LENGTH = 256
MAX_BAD_WORD_CELLS = 1 << 17
"""Forms of all bad words times the tokens of the longest: so many tokens are compared with what a
branch has generated, at each of its steps, while all other branches wait."""

OPTION_NAMES = ("priority", "tenant", "cache_salt", "deadline_s")


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """What a request says of its place among others.

    priority: smaller goes first, under the priority policy; other policies refuse all but 0.
    tenant: whose it is, for fair sharing, the ledger and the cache: prefixes are shared within a
        tenant only. cache_salt: and only among requests with the same salt.
    deadline_s: seconds after its arrival by which it should have ended, for the deadline policy.
    is_public: its prefixes may be read by all tenants, as long as they are cached.

    Raises InvalidRequestError that names the field.
    """

    priority: int = 0
    tenant: str = ""
    cache_salt: str = ""
    deadline_s: float | None = None
    is_public: bool = False

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

    @property
    def cache_domain(self) -> str:
        """The name of the domain: no two pairs of tenant and salt have the same."""
        if self.is_public:
            return PUBLIC_DOMAIN
        return f"{len(self.tenant)}:{self.tenant}{self.cache_salt}"


NO_OPTIONS = RequestOptions()


def check_priority(options: RequestOptions, limits: ModelLimits) -> None:
    """Raises InvalidRequestError for a priority that the scheduling policy does not read."""
    if options.priority and not limits.reads_priority:
        raise InvalidRequestError(
            f"priority is {options.priority}, but the engine's scheduling policy reads no"
            " priorities; leave it out, or start the engine with"
            " scheduling_policy='priority' (--scheduling-policy priority)",
            "priority",
        )


class PromptInput(NamedTuple):
    """A prompt of the offline API, taken apart."""

    prompt: str | list[int]
    options: RequestOptions = NO_OPTIONS
    adapter: LoRARequest | None = None


CompileGrammar: TypeAlias = Callable[[str, str], object]
"""Compiles a grammar for a cache domain, to find out whether it can be obeyed: takes milliseconds,
or much longer. Raises InvalidRequestError that names what can't be obeyed."""


class InputProcessor:
    """Makes requests for one model; any number of threads may use one."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        limits: ModelLimits,
        compile_grammar: CompileGrammar | None = None,
    ) -> None:
        """tokenizer: None serves token ids only. compile_grammar: None refuses grammars."""
        self._tokenizer = tokenizer
        self._limits = limits
        self._compile = compile_grammar
        self._last_words: tuple[Sequence[str], list[list[int]]] = ((), [])
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
        """Tokenize (text), resolve and check. seed: used where the params have none. beams: of a
        beam search, whose params are `sampling_params_of` it. grammar: as `prepare_grammar` gave
        it; None: that of params.structured_outputs, if it has any. adapter: what the engine found.

        Raises InvalidRequestError; whether the KV blocks suffice is checked by `Engine.add`.
        """
        check_priority(options, self._limits)
        if not self._limits.generates:
            raise InvalidRequestError(NO_GENERATION)
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
        )

    def resolve(
        self,
        params: SamplingParams,
        num_prompt_tokens: int,
        seed: int,
        beams: BeamSearchParams | None = None,
        grammar: str | None = None,
    ) -> DecodingParams:
        """The params of one prompt, in token ids; the arguments and errors are `make_request`'s."""
        if params.stop and self._tokenizer is None:
            raise InvalidRequestError(
                "stop strings need a tokenizer, but the engine runs without; use stop_token_ids",
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
        """Text with its special tokens, or token ids as they are."""
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
        """What the params keep of a prompt; see SamplingParams."""
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
        """The grammar of what is wanted, which is remembered for requests with the very same; it
        compiles, for a cache domain. Raises InvalidRequestError that names what in it can't be
        obeyed."""
        if wanted is None:
            return None
        known, grammar = self._last_format  # read once: another thread may change it
        if known is not wanted:
            if self._tokenizer is None or self._compile is None:
                raise InvalidRequestError(
                    "structured_outputs need a tokenizer, but the engine runs without; leave them"
                    " out",
                    "structured_outputs",
                )
            grammar = grammar_of(wanted)
            self._compile(grammar, domain)
            self._last_format = (wanted, grammar)
        return grammar

    def prepare_bad_words(self, words: Sequence[str]) -> list[list[int]]:
        """Their token ids in all forms, which are remembered for requests with the very same list:
        of thousands of words this takes long. Raises InvalidRequestError."""
        if not words:
            return []
        if self._tokenizer is None:
            raise InvalidRequestError(
                "bad_words need a tokenizer, but the engine runs without; use logit_bias",
                "bad_words",
            )
        known, found = self._last_words  # read once: another thread may change it
        if known is not words:  # the prompts of one call have the very same list
            found = [ids for word in words for ids in self._tokenizer.encode_bad_word(word)]
            num_cells = len(found) * max(map(len, found))
            if num_cells > MAX_BAD_WORD_CELLS:
                raise InvalidRequestError(
                    f"bad_words has {len(words)} words, and {max(map(len, found))} tokens in the"
                    f" longest, which is too much to look for at each step; send fewer, or shorter",
                    "bad_words",
                )
            self._last_words = (words, found)
        return found


def read_prompt(prompt: Any) -> PromptInput:
    """One prompt of the offline API: text, or {"prompt": text} or {"prompt_token_ids": [...]} with
    any of priority, tenant, cache_salt and deadline_s beside it."""
    if isinstance(prompt, str):
        check_characters(prompt, "prompt")
        return PromptInput(prompt)
    if isinstance(prompt, Mapping):
        unknown = set(prompt) - {"prompt", "prompt_token_ids", *OPTION_NAMES}
        if unknown:
            raise InvalidRequestError(
                f"a prompt has the unknown key {sorted(unknown)[0]!r}; known are 'prompt',"
                f" 'prompt_token_ids', {', '.join(map(repr, OPTION_NAMES))}",
                "prompt",
            )
        options = RequestOptions(**{name: prompt[name] for name in OPTION_NAMES if name in prompt})
        token_ids = as_python(prompt.get("prompt_token_ids"))
        if isinstance(token_ids, Sequence) and not isinstance(token_ids, (str, bytes)):
            return PromptInput(_whole_numbers(token_ids), options)
        if token_ids is None and isinstance(prompt.get("prompt"), str):
            check_characters(prompt["prompt"], "prompt")
            return PromptInput(str(prompt["prompt"]), options)
    raise InvalidRequestError(
        f'a prompt is {prompt!r:.80}, but must be text or {{"prompt_token_ids": [...]}}', "prompt"
    )


def _whole_numbers(token_ids: Sequence[Any]) -> list[int]:
    """Token ids of any type of whole numbers; what is none stays, and is refused with the rest."""
    if countOf(map(type, token_ids), int) == len(token_ids):
        return list(token_ids)
    whole = [(token_id, whole_number(token_id)) for token_id in token_ids]
    return [given if found is None else found for given, found in whole]


def with_adapters(prompts: Sequence[PromptInput], given: Any) -> list[PromptInput]:
    """The prompts with what their caller gave as lora_request: one for all, a list with one or None
    for each, or None. Raises InvalidRequestError."""
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
