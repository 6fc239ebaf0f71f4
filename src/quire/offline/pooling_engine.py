"""The methods of `LLM` that embed, classify and score.

They take and return what vLLM's of the same names do. Knows nothing of generation.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from quire.compat.refusals import POOLED_ADAPTERS, TEXT_ONLY
from quire.core.checked_fields import check_harmless
from quire.core.memory.kv_cache_manager import KVManagerFactory
from quire.engine_client.pooling_inputs import PoolingInputs, Truncation
from quire.errors import InvalidRequestError, did_you_mean, shown
from quire.offline.local_engine import LocalEngine
from quire.offline.pooling import (
    ClassificationOutput,
    EmbeddingOutput,
    OfflinePooling,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringOutput,
    read_pairs,
    read_prompts,
)
from quire.offline.pooling_arguments import TASKS, PoolingArguments
from quire.options.engine_options import EngineOptions
from quire.text.chat_encoding import encode_chat
from quire.text.chat_template import ChatTemplate

Prompt = str | Mapping[str, Any]

_EMBEDS = ("embed", "token_embed")
_FOREIGN: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "lora_request": ((), POOLED_ADAPTERS),
    "mm_processor_kwargs": (({},), TEXT_ONLY),
    "tokenization_kwargs": (({},), "truncate_prompt_tokens shortens a prompt"),
    "use_tqdm": ((False, True), "these calls are short, and have no progress bar"),
}


class PoolingEngine(LocalEngine):
    """A model that embeds or scores, and an engine in this process. Any method may be called from
    any thread."""

    def __init__(
        self,
        options: EngineOptions,
        *,
        kv_allocator: KVManagerFactory | None = None,
        pooling_task: str | None = None,
    ) -> None:
        """Load the model. pooling_task: see `PoolerSettings`. Raises ConfigurationError and its
        kinds."""
        super().__init__(options, kv_allocator=kv_allocator)
        inputs = PoolingInputs(self._tokenizer, self.engine.limits)
        self._pooling = OfflinePooling(self._requests, inputs, pooling_task)
        self._allow_special_tokens = options.allow_special_tokens

    def embed(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        dimensions: int | None = None,
        normalize: bool | None = None,
        truncate_prompt_tokens: int | None = None,
        pooling_params: PoolingArguments | None = None,
        **others: Any,
    ) -> list[PoolingRequestOutput[EmbeddingOutput]]:
        """The vector of each prompt, in `outputs.embedding`; results in the order of the prompts.

        prompts: as of `generate`. dimensions: only so many elements, the first ones, for models
            that were trained for it (Matryoshka). normalize: to length 1; None: as the model's
            folder says. truncate_prompt_tokens: the most tokens of a prompt, -1: as many as the
            model takes; None: longer ones are refused. pooling_params: vLLM's PoolingParams, in
            place of dimensions and normalize.
        others: vLLM's further arguments (lora_request and the like), where they ask for nothing.

        Raises InvalidRequestError, and StepFailedError where a prompt's computation fails.
        """
        _check_others("embed", others)
        given = _settled(pooling_params, dimensions=dimensions, use_activation=normalize)
        return self._pooling.embed(
            read_prompts(prompts),
            dimensions=given.dimensions,
            normalize=given.use_activation,
            truncation=Truncation(truncate_prompt_tokens),
        )

    def classify(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        truncate_prompt_tokens: int | None = None,
        pooling_params: PoolingArguments | None = None,
        **others: Any,
    ) -> list[PoolingRequestOutput[ClassificationOutput]]:
        """What the head of a classifier says of each prompt, in `outputs.probs`. Otherwise as
        `embed`; so are the errors."""
        _check_others("classify", others)
        given = _without_dimensions(_settled(pooling_params))
        return self._pooling.classify(
            read_prompts(prompts),
            activates=given.use_activation,
            truncation=Truncation(truncate_prompt_tokens),
        )

    def encode(
        self,
        prompts: Prompt | Sequence[Prompt],
        pooling_params: PoolingArguments | None = None,
        *,
        pooling_task: str | None = None,
        truncate_prompt_tokens: int | None = None,
        **others: Any,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """What the model makes of each prompt, as a tensor in `outputs.data`.

        pooling_task: "embed" or "classify", as the methods of these names; "token_embed",
            "token_classify": of each token by itself, whose rows are in the order of
            `prompt_token_ids`; None: what the model is for. Otherwise as `embed`.
        """
        _check_others("encode", others)
        task = self._pooling.usual_task if pooling_task is None else pooling_task
        if task not in TASKS:
            raise InvalidRequestError(
                f"pooling_task is {shown(task)}, but must be one of {', '.join(TASKS)}",
                "pooling_task",
            )
        given = _settled(pooling_params)
        how: dict[str, Any] = {"truncation": Truncation(truncate_prompt_tokens)}
        if task in _EMBEDS:
            how |= {"dimensions": given.dimensions, "normalize": given.use_activation}
        else:
            how["activates"] = _without_dimensions(given).use_activation
        return self._pooling.encode(read_prompts(prompts), task, **how)

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        *,
        instruction: str | None = None,
        truncate_prompt_tokens: int | None = None,
        chat_template: str | None = None,
        **others: Any,
    ) -> list[PoolingRequestOutput[ScoringOutput]]:
        """How well the texts of data_2 go with those of data_1, or with the one, in
        `outputs.score`: by the model's head, by its two tokens, or else the cosine of embeddings;
        where pooler_config has the task "token_embed", by the vectors of all tokens.

        instruction: what is looked for, for Qwen3's rerankers. chat_template: Jinja that writes a
            pair as the model was trained with it, from messages with the roles "query" and
            "document". Otherwise as `embed`; so are the errors.
        """
        _check_others("score", others)
        pairs = read_pairs(data_1, data_2)
        truncation = Truncation(truncate_prompt_tokens)
        if chat_template is None:
            return self._pooling.score(pairs, instruction=instruction, truncation=truncation)
        template = self._template(chat_template)
        rendered = [self._rendered(template, pair, instruction) for pair in pairs]
        return self._pooling.score_rendered(rendered, truncation=truncation)

    # ---- inside -----------------------------------------------------------------------------

    def _template(self, source: Any) -> ChatTemplate:
        """One in place of the model's own. Raises InvalidRequestError, CheckpointError."""
        if not isinstance(source, str) or not source:
            raise InvalidRequestError(
                f"chat_template is {shown(source)}, but must be Jinja, or the path of a file",
                "chat_template",
            )
        self.get_tokenizer()
        assert self._tokenizer_folder is not None
        return ChatTemplate.from_option(source, self._tokenizer_folder, origin="the call")

    def _rendered(
        self, template: ChatTemplate, pair: tuple[str, str], instruction: str | None
    ) -> list[int]:
        """The token ids of a pair; its texts have no special tokens, as those of a chat."""
        roles = zip(("query", "document"), pair, strict=True)
        return encode_chat(
            template,
            self.get_tokenizer(),
            [{"role": role, "content": text} for role, text in roles],
            allow_special_tokens=self._allow_special_tokens,
            add_special_tokens=True,
            add_generation_prompt=False,
            chat_template_kwargs=None if instruction is None else {"instruction": instruction},
        ).token_ids


def _settled(given: PoolingArguments | None, **ours: Any) -> PoolingArguments:
    """The parameters, or our own arguments in their place. Raises InvalidRequestError for both."""
    named = {name: value for name, value in ours.items() if value is not None}
    if given is None:
        return PoolingArguments(**named)
    if not isinstance(given, PoolingArguments):
        raise InvalidRequestError(
            f"pooling_params is {shown(given)}, but must be a PoolingParams", "pooling_params"
        )
    if named:
        raise InvalidRequestError(
            "pooling_params stands beside dimensions or normalize, which it has itself; give one",
            "pooling_params",
        )
    return given


def _without_dimensions(given: PoolingArguments) -> PoolingArguments:
    if given.dimensions is not None:
        raise InvalidRequestError(
            f"dimensions is {given.dimensions}, but scores are not cut; leave it out", "dimensions"
        )
    return given


def _check_others(method: str, others: Mapping[str, object]) -> None:
    """Raises InvalidRequestError that names the first argument which is unknown, or asks for
    something."""
    for name, value in others.items():
        if name not in _FOREIGN:
            raise InvalidRequestError(
                f"{method} has no argument {name}{did_you_mean(name, _FOREIGN)}", name
            )
        check_harmless(name, value, *_FOREIGN[name])
