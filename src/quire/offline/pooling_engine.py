"""The methods of `LLM` that embed, classify and score.

Arguments and results are those of vLLM's methods of the same names. Generates no text.
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
    """A model that embeds or scores, and an engine in this process.

    Any method may be called from any thread.
    """

    def __init__(
        self,
        options: EngineOptions,
        *,
        kv_allocator: KVManagerFactory | None = None,
        pooling_task: str | None = None,
    ) -> None:
        """Load the model. `pooling_task` is the task of `PoolerSettings`.

        Raises ConfigurationError and its subclasses.
        """
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
        """The vector of each prompt, in `outputs.embedding`, in the order of the prompts.

        `prompts`: those of `LLM.generate`.
        `dimensions`: the number of a vector's first elements that are returned, for models that
            were trained for it (Matryoshka); None means all.
        `normalize`: whether vectors are scaled to length 1; None means as the model's folder says.
        `truncate_prompt_tokens`: the number of first tokens to which a longer prompt is cut; -1
            means the model's limit. If it is None, prompts above the limit are refused.
        `pooling_params`: vLLM's PoolingParams, in place of dimensions and normalize.
        `others`: vLLM's further arguments, such as lora_request, with values that change nothing.

        Raises InvalidRequestError, and StepFailedError if a prompt's computation fails.
        """
        _check_others("embed", others)
        given = _joined_params(pooling_params, dimensions=dimensions, use_activation=normalize)
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
        """The output of a classifier's head for each prompt, in `outputs.probs`.

        Other arguments and errors are those of `embed`.
        """
        _check_others("classify", others)
        given = _without_dimensions(_joined_params(pooling_params))
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
        """The vectors or scores of each prompt, as a tensor in `outputs.data`.

        `pooling_task` is "embed" or "classify", as for the methods of these names, or "token_embed"
        or "token_classify", which return a row for each of `prompt_token_ids`. None means the
        model's own task. Other arguments and errors are those of `embed`.
        """
        _check_others("encode", others)
        task = self._pooling.usual_task if pooling_task is None else pooling_task
        if task not in TASKS:
            raise InvalidRequestError(
                f"pooling_task is {shown(task)}, but must be one of {', '.join(TASKS)}",
                "pooling_task",
            )
        given = _joined_params(pooling_params)
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
        """How well each text of `data_2` matches that of `data_1`, in `outputs.score`.

        One text in `data_1` is paired with all of `data_2`. The score is that of the model's head,
        or of its tokens for yes and no, or else the cosine of embeddings. If pooler_config has the
        task "token_embed", the vectors of all tokens are compared.

        `instruction` says what is searched for, for Qwen3's rerankers. `chat_template` is Jinja
        that writes a pair in the model's training format, from messages with the roles "query" and
        "document". Other arguments and errors are those of `embed`.
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
        """The chat template that a call gives in place of the model's own.

        Raises InvalidRequestError, CheckpointError.
        """
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
        """The token ids of a pair. As in a chat, special tokens written out in its texts are
        encoded as plain text, unless allow_special_tokens is set."""
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


def _joined_params(given: PoolingArguments | None, **ours: Any) -> PoolingArguments:
    """The call's pooling_params; if None, parameters made from the call's other arguments.

    Raises InvalidRequestError if both pooling_params and other arguments are given.
    """
    named = {name: value for name, value in ours.items() if value is not None}
    if given is None:
        return PoolingArguments(**named)
    if not isinstance(given, PoolingArguments):
        raise InvalidRequestError(
            f"pooling_params is {shown(given)}, but must be a PoolingParams", "pooling_params"
        )
    if named:
        raise InvalidRequestError(
            "pooling_params is given together with dimensions or normalize, its fields; give one",
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
    """Raises InvalidRequestError for the first argument that is unknown or has a refused value."""
    for name, value in others.items():
        if name not in _FOREIGN:
            raise InvalidRequestError(
                f"{method} has no argument {name}{did_you_mean(name, _FOREIGN)}", name
            )
        check_harmless(name, value, *_FOREIGN[name])
