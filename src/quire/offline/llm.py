"""The offline API: `LLM(...).generate(...)`, with vLLM's names.

    from quire import LLM, SamplingParams
    for output in LLM().generate(["import os"], SamplingParams(max_tokens=32)):
        print(output.outputs[0].text)

The engine runs in this process, inside the calls. Several threads may call at once: their requests
are batched together, and each gets the tokens that it would get alone.
"""

import inspect
from collections.abc import Generator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any, Self

from tqdm import tqdm

from quire.core.adapters import LoRARequest
from quire.core.checked_fields import check_harmless
from quire.core.memory.kv_cache_manager import KVManagerFactory
from quire.core.sampling_params import BeamSearchParams, SamplingParams, sampling_params_of
from quire.engine_client.inputs import (
    PromptInput,
    read_picture_settings,
    read_prediction,
    read_prompt,
    with_adapters,
)
from quire.engine_client.results import RequestOutput
from quire.errors import AdapterError, ConfigurationError, InvalidRequestError, did_you_mean
from quire.observability.log import get_logger
from quire.offline.beams import BeamSearchOutput, beam_search_output
from quire.offline.branch_handle import BranchHandle
from quire.offline.interrupts import deferred_interrupts
from quire.offline.pooling_arguments import PoolerSettings, pooler_settings
from quire.offline.pooling_engine import PoolingEngine
from quire.option_fields import takes_arguments_of
from quire.options.engine_options import EngineOptions
from quire.runtime.torch_profile import ProfilerSettings, TorchProfile
from quire.text.chat_template import ChatTemplate

Prompt = str | Mapping[str, Any]
Message = Mapping[str, Any]

logger = get_logger(__name__)

FOREIGN_ARGUMENTS: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "chat_template_content_format": (("auto",), "the content format follows from the template"),
    "prediction": ((), "set it in each prompt, as in {'prompt': ..., 'prediction': '...'}"),
    "priority": ((), "set it in each prompt, as in {'prompt': ..., 'priority': 1}"),
    "prompt_token_ids": ((), "prompts takes it, as in [{'prompt_token_ids': [...]}]"),
    "reasoning_effort": ((), "set it in chat_template_kwargs if the template reads it"),
    "tokenization_kwargs": (({},), "SamplingParams(truncate_prompt_tokens=...) shortens a prompt"),
}
"""Further arguments of vLLM's generate and chat. Each has the values that are accepted because they
change nothing, and a sentence that refuses other values and names quire's alternative."""

# A call shows a progress bar after this many seconds.
PROGRESS_DELAY_S = 1.0


@dataclass(frozen=True)
class LLMArguments(EngineOptions):
    """The arguments of `LLM`: the engine's options, and further arguments."""

    kv_allocator: KVManagerFactory | None = None
    profiler_config: ProfilerSettings | Mapping[str, Any] | None = None
    pooler_config: PoolerSettings | Mapping[str, Any] | None = None
    #: For type checkers; `from_mapping` reads it as kv_cache_memory.
    kv_cache_memory_bytes: int | str | None = None
    #: For type checkers; `from_mapping` reads it as num_blocks.
    num_gpu_blocks_override: int | None = None

    def _check_together(self) -> None:
        if self.kv_allocator is not None:
            if not callable(self.kv_allocator):
                raise ConfigurationError(
                    f"kv_allocator is {self.kv_allocator!r:.80}, but must be a factory, like"
                    " quire.bench.baselines.contiguous.contiguous('max'); leave it out for pages"
                )
            if self.enable_prefix_caching is None:
                object.__setattr__(self, "enable_prefix_caching", False)  # frozen
        super()._check_together()


class LLM(PoolingEngine):
    """A model, its KV cache and an engine.

    Any method may be called from any thread, several at a time. Requests of all threads are
    continuously batched together: a thread that waits for its own requests steps the engine for
    all. Requests without a seed draw one in their order of arrival. The attribute `engine` may be
    used by one thread only, while no other calls methods.
    """

    @takes_arguments_of(LLMArguments)
    def __init__(self, model: str | None = None, **options: Any) -> None:
        """Load a model: a local folder, a hub id, or None for the embedded one.

        `kv_allocator`: the factory of another manager of KV memory, for comparisons, such as
            `quire.bench.baselines.contiguous.contiguous("max")`; None means pages.
        `profiler_config`: settings of `start_profile`, as {"torch_profiler_dir": "traces"}; see
            `runtime.torch_profile.ProfilerSettings`.
        `pooler_config`: settings of `encode` and `score`, as {"task": "token_embed"}; see
            `offline.pooling_arguments.PoolerSettings`.
        `kv_cache_memory_bytes`, `num_gpu_blocks_override`: vLLM's names of kv_cache_memory and
            num_blocks.

        All other options are those of EngineOptions. Raises ConfigurationError (a ValueError) for
        an unknown option, a value that can't be obeyed, or a model that can't be loaded.
        """
        pooler = pooler_settings(options.get("pooler_config"))
        options = pooler.joined(options)
        checked = LLMArguments.from_mapping({**options, "model": model})
        self._chat_template: ChatTemplate | None = None
        self._profiler_settings = _profiler_settings(checked.profiler_config)
        self._profile: TorchProfile | None = None
        super().__init__(checked, kv_allocator=checked.kv_allocator, pooling_task=pooler.task)

    @classmethod
    def from_engine_args(cls, engine_args: EngineOptions) -> Self:
        """An LLM with the options of `EngineArgs`."""
        return cls(**engine_args.as_mapping())

    @property
    def llm_engine(self) -> Self:
        """This object, which has the methods of vLLM's `llm_engine`."""
        return self

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt] | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        **others: Any,
    ) -> list[RequestOutput]:
        """Continue each prompt. Results are in the order of the prompts.

        `prompts`: text, {"prompt_token_ids": [...]}, or a list of these; required. Mappings may
            also set multi_modal_data, as {"image": [picture, ...]}, with a picture of Pillow, an
            array of uint8 or a data: URL for each placeholder of an image. They may also set
            prediction, the text or token ids that are expected, for drafts; and priority,
            tenant, cache_salt, deadline_s and speculation_history; see
            `engine_client.inputs.RequestOptions`.
        `sampling_params`: one for all prompts, or a list with one for each; None means the model's
            defaults.
        `use_tqdm`: whether a progress bar is shown if the call takes long.
        `lora_request`: the adapter for all prompts, or a list with an adapter or None for each;
            needs enable_lora.
        `others`: mm_processor_kwargs, settings of the image processor for this call; vLLM's further
            arguments, such as priority, with values that change nothing.

        Raises InvalidRequestError before any prompt of this call is run. If a request's own
        computation fails, or its adapter can't be read, its finish_reason is "error" and its
        `error` says why; the others go on. Once the images of this call's prompts take 2 GiB (as
        the encoder's input), further prompts are read while others run. If one of these is invalid,
        its finish_reason is "error", too.
        """
        settings = others.pop("mm_processor_kwargs", None)
        _check_others("generate", others)
        listed = _with_settings(_read_prompts(prompts), settings)
        listed = with_adapters(listed, lora_request)
        return self._run(listed, _one_each(sampling_params, len(listed)), use_tqdm)

    def beam_search(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: BeamSearchParams,
        use_tqdm: bool = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
    ) -> list[BeamSearchOutput]:
        """The most likely continuations of each prompt that a beam search finds, best first.

        Each prompt gets params.beam_width sequences, equal to those of transformers' beam search.
        Other arguments and errors are those of `generate`.
        """
        if not isinstance(params, BeamSearchParams):
            raise InvalidRequestError(
                f"params is {params!r:.80}, but must be a BeamSearchParams", "params"
            )
        params = params.clone()  # read again at the end; the caller may change the original
        listed = with_adapters(_read_prompts(prompts), lora_request)
        sampling = [sampling_params_of(params)] * len(listed)
        outputs = self._run(listed, sampling, use_tqdm, beams=params)
        return [beam_search_output(output, params, self._tokenizer) for output in outputs]

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **others: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation, or a list of conversations.

        A conversation is a list of {"role": ..., "content": ...}. Models that take images read them
        from parts of the content, as {"type": "image_url", "image_url": {"url": "data:..."}} or
        {"type": "image", "image": picture}. All else is as for `generate`.

        `tools`: functions that the template shows to the model; the answer is raw text, with calls
            in the model's own format.
        `others`: chat_template, Jinja or the path of a file with it, in place of the model's own;
            prediction, the expected answer as text or token ids; further arguments of `generate`.
        """
        # First, check the arguments that are not the messages.
        source, adapters = others.pop("chat_template", None), others.pop("lora_request", None)
        prediction = read_prediction(others.pop("prediction", None))
        settings = others.pop("mm_processor_kwargs", None)
        _check_others("chat", others)
        template = None if source is None else self._template(source)
        # Then render each conversation, and run all prompts together.
        several = bool(messages) and not isinstance(messages[0], Mapping)
        conversations: list[Any] = list(messages) if several else [messages]
        prompts = [
            self._render(
                conversation,
                template=template,
                add_generation_prompt=add_generation_prompt and not continue_final_message,
                continue_final_message=continue_final_message,
                chat_template_kwargs=chat_template_kwargs,
                tools=tools or None,
            )._replace(prediction=prediction)
            for conversation in conversations
        ]
        prompts = with_adapters(_with_settings(prompts, settings), adapters)
        return self._run(prompts, _one_each(sampling_params, len(prompts)), use_tqdm)

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        lora_request: LoRARequest | None = None,
    ) -> Generator[str, None, None]:
        """Continue one prompt, and yield text as it comes. Closing the iterator aborts the
        request."""
        (given,) = with_adapters([read_prompt(prompt)], lora_request)
        return self._stream(given, sampling_params or SamplingParams())

    def stream_chat(
        self,
        messages: Sequence[Message],
        sampling_params: SamplingParams | None = None,
        *,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        lora_request: LoRARequest | None = None,
    ) -> Generator[str, None, None]:
        """Answer one conversation, and yield text as `stream` does."""
        prompt = self._render(
            messages, add_generation_prompt=True, chat_template_kwargs=chat_template_kwargs
        )
        (given,) = with_adapters([prompt], lora_request)
        return self._stream(given, sampling_params or SamplingParams())

    def start(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        lora_request: LoRARequest | None = None,
    ) -> BranchHandle:
        """Begin to continue one prompt. The caller steps it, and may branch it while it runs."""
        params = (sampling_params or SamplingParams()).clone()  # forks use the copy, too
        if params.n != 1:
            raise InvalidRequestError(f"n is {params.n}, but fork the generation instead", "n")
        given = with_adapters([read_prompt(prompt)], lora_request)
        group = self._requests.prepare(given, [params])
        try:
            self._requests.open(group)
            return BranchHandle(self._requests, group.assemblers[0], 0, params)
        except BaseException:  # such as Ctrl-C: the caller gets no handle to close
            self._requests.close(group)
            raise

    def publish_prefix(
        self,
        prompt: Prompt,
        use_tqdm: bool = False,
        *,
        lora_request: LoRARequest | None = None,
    ) -> int:
        """Compute a prompt, and let every tenant and salt reuse it from the prefix cache.

        It is evicted like other blocks if memory is needed. Requests with the same `lora_request`
        reuse it. Returns the number of its tokens that were computed. Raises AdapterError for an
        adapter that can't be read.
        """
        (given,) = with_adapters([read_prompt(prompt)], lora_request)
        public = given._replace(options=replace(given.options, is_public=True))
        found = self._run([public], [SamplingParams(max_tokens=1)], use_tqdm)[0]
        if found.error is not None and found.error.startswith(AdapterError.TEXT):
            raise AdapterError(found.error)
        return len(found.prompt_token_ids) - found.num_cached_tokens

    def pin_prefix(
        self,
        prompt: Prompt,
        *,
        priority: int = 0,
        duration_s: float | None = None,
        published: bool = False,
        lora_request: LoRARequest | None = None,
    ) -> int:
        """Keep a prompt's cached full blocks longer than all blocks that are not pinned.

        Among pinned prefixes, those of the lowest `priority` are evicted first. The pin ends after
        `duration_s`; None means never. If `published`, pins the prefix of `publish_prefix`, not the
        tenant's own. `lora_request` is the adapter with which it was computed. Returns the number
        of pinned tokens. Raises InvalidRequestError for a duration that isn't above 0, and
        AdapterError for an adapter that can't be read.
        """
        if duration_s is not None and not duration_s > 0:
            raise InvalidRequestError(
                f"duration_s is {duration_s}, but must be above 0", "duration_s"
            )
        (given,) = with_adapters([read_prompt(prompt)], lora_request)
        options = replace(given.options, is_public=published)
        return self._requests.pin(given._replace(options=options), priority, duration_s)

    def start_profile(self, profile_prefix: str | None = None) -> None:
        """Record the steps from now on, as `profiler_config` says.

        `profile_prefix` is the beginning of the trace file's name. Raises InvalidRequestError
        without a `profiler_config`, and while a recording runs.
        """
        if self._profiler_settings is None:
            raise InvalidRequestError(
                "nothing says what to record: make the LLM with profiler_config={'profiler':"
                " 'torch', 'torch_profiler_dir': 'traces'}"
            )
        if self._profile is not None:
            raise InvalidRequestError("a recording runs; call stop_profile() first")
        profile = TorchProfile(self._profiler_settings, profile_prefix or "quire")
        self._profile = profile
        profile.start()
        self.engine.on_step = profile.on_step

    def stop_profile(self) -> None:
        """End the recording, write its trace, and log the file's path.

        Raises InvalidRequestError if no recording runs.
        """
        profile, self._profile = self._profile, None
        if profile is None:
            raise InvalidRequestError("no recording runs; call start_profile() first")
        self.engine.on_step = None
        logger.info("the trace of the steps is %s", profile.stop())

    # ---- inside -----------------------------------------------------------------------------

    def _render(
        self, messages: Sequence[Message], template: ChatTemplate | None = None, **options: Any
    ) -> PromptInput:
        """The token ids of a conversation; only the template adds special tokens.

        If `template` is None, the model's template is used. `options` are options of `encode_chat`.
        """
        self.get_tokenizer()
        if template is None and self._chat_template is None:
            assert self._tokenizer_folder is not None
            self._chat_template = ChatTemplate.from_folder(self._tokenizer_folder)
        chosen = template or self._chat_template
        assert chosen is not None
        return self._images.render(
            chosen, messages, allow_special_tokens=self._allow_special_tokens, **options
        )

    def _run(
        self,
        prompts: Sequence[PromptInput],
        params: Sequence[SamplingParams],
        use_tqdm: bool,
        *,
        beams: BeamSearchParams | None = None,
    ) -> list[RequestOutput]:
        group = self._requests.prepare(prompts, params, beams)
        try:
            self._requests.open(group)
            with _ProgressBar(len(prompts)) if use_tqdm else nullcontext() as progress:
                while group.unfinished or group.rest:
                    counts = self._requests.wait(group, for_all=not (progress or group.rest))
                    if progress:
                        progress.advance(*counts)
                    self._requests.open_rest(group)
        finally:
            self._requests.close(group)
        outputs = [assembler.output for assembler in group.assemblers]
        for output in outputs:
            if output.error is not None:
                logger.warning(
                    "request %s ended with an error: %s", output.request_id, output.error
                )
        return outputs

    def _stream(self, prompt: PromptInput, params: SamplingParams) -> Generator[str, None, None]:
        if params.n != 1:
            raise InvalidRequestError(f"n is {params.n}, but a stream has one branch", "n")
        group = self._requests.prepare([prompt], [params])
        try:
            self._requests.open(group)
            # Steps taken for other requests may also bring this stream's text, even its last
            # tokens.
            while text := self._requests.next_text(group.assemblers[0], 0):
                yield text
        finally:  # may run in any thread, when a dropped stream is collected
            self._requests.abandon(group)


def _profiler_settings(given: Any) -> ProfilerSettings | None:
    """The settings in the argument profiler_config. Raises ConfigurationError."""
    if given is None or isinstance(given, ProfilerSettings):
        return given
    if not isinstance(given, Mapping):
        raise ConfigurationError(
            f"profiler_config is {given!r:.80}, but must be a ProfilerConfig, or a mapping of its"
            " fields"
        )
    try:
        return ProfilerSettings(**given)
    except InvalidRequestError as error:
        raise ConfigurationError(f"profiler_config: {error}") from error


class _ProgressBar:
    """A bar over requests that also shows tokens per second.

    tqdm has one lock for all bars of the process. A signal's handler that raises in tqdm's code may
    leave it locked for all threads, so signals are deferred there.
    """

    def __init__(self, num_requests: int) -> None:
        with deferred_interrupts():
            self._bar = tqdm(
                total=num_requests,
                delay=PROGRESS_DELAY_S,
                unit="request",
                desc="generating",
                dynamic_ncols=True,
            )
        self._num_tokens = 0

    def advance(self, num_requests: int, num_tokens: int) -> None:
        self._num_tokens += num_tokens
        with deferred_interrupts():
            elapsed_s = self._bar.format_dict["elapsed"]
            if elapsed_s:
                rate = self._num_tokens / elapsed_s
                self._bar.set_postfix_str(f"{rate:.0f} tokens/s", refresh=False)
            self._bar.update(num_requests)

    def __enter__(self) -> "_ProgressBar":
        return self

    def __exit__(self, *_: object) -> None:
        with deferred_interrupts():
            self._bar.close()


def _check_others(method: str, others: Mapping[str, object]) -> None:
    """Raises InvalidRequestError for the first argument that is unknown or has a refused value."""
    for name, value in others.items():
        if name not in FOREIGN_ARGUMENTS:
            known = inspect.signature(getattr(LLM, method)).parameters
            own = [argument for argument in known if argument not in ("self", "others")]
            names = [*own, *FOREIGN_ARGUMENTS]
            raise InvalidRequestError(
                f"{method} has no argument {name}{did_you_mean(name, names)}", name
            )
        check_harmless(name, value, *FOREIGN_ARGUMENTS[name])


def _read_prompts(prompts: Prompt | Sequence[Prompt] | None) -> list[PromptInput]:
    if not isinstance(prompts, (str, Mapping, Sequence)):
        raise InvalidRequestError(
            f"prompts is {prompts!r:.80}, but must be a text, a mapping with prompt_token_ids, or a"
            " list of these",
            "prompts",
        )
    listed: list[Any] = [prompts] if isinstance(prompts, (str, Mapping)) else list(prompts)
    return [read_prompt(prompt) for prompt in listed]


def _with_settings(prompts: list[PromptInput], given: Any) -> list[PromptInput]:
    """The prompts with a call's mm_processor_kwargs, which a prompt's own replace."""
    settings = read_picture_settings(given)
    return [
        prompt._replace(picture_settings={**settings, **prompt.picture_settings})
        for prompt in prompts
    ]


def _one_each(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> Sequence[SamplingParams]:
    if params is None:
        return [SamplingParams()] * count
    if isinstance(params, SamplingParams):
        return [params] * count
    listed: list[Any] = list(params)
    if len(listed) != count:
        raise InvalidRequestError(
            f"there are {count} prompts, but {len(listed)} sampling_params; give one, or one each",
            "sampling_params",
        )
    for entry in listed:
        if not isinstance(entry, SamplingParams):
            raise InvalidRequestError(
                f"sampling_params contains {entry!r:.80}, but each must be a SamplingParams",
                "sampling_params",
            )
    return listed
