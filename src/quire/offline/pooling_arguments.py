"""vLLM's parameters of calls that embed, classify or score: PoolerConfig and PoolingParams.

Only types are checked here; `PoolingInputs` checks the bounds that depend on the model. Called by
`pooling_engine`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from quire.compat.sampling_fields import CompatTable
from quire.core.checked_fields import CheckedFields, answers_mistakes
from quire.core.sampling_checks import flag, integer
from quire.errors import ConfigurationError, InvalidRequestError, shown
from quire.options.pooling_options import POOLING_TYPES

_CALL = "PoolingParams sets it for each call"
_TOKENS = "LLM.encode(pooling_task='token_embed') has the vectors of all tokens"
_CHUNKS = "cut a text into chunks, and embed each"

EMBED, CLASSIFY, TOKEN_EMBED, TOKEN_CLASSIFY = TASKS = (
    "embed",
    "classify",
    "token_embed",
    "token_classify",
)
"""Tasks of `LLM.encode`, by vLLM's names."""
TOKEN_TASKS = (TOKEN_EMBED, TOKEN_CLASSIFY)


def _use_activation(value: Any) -> bool | None:
    return None if value is None else flag("use_activation", value)


def _task(value: Any) -> str | None:
    if value is None or value in TASKS:
        return None if value is None else str(value)
    raise InvalidRequestError(
        f"task is {shown(value)}, but must be None or one of {', '.join(TASKS)}", "task"
    )


def _pooling_type(value: Any) -> str | None:
    if value is None or (isinstance(value, str) and value.lower() in POOLING_TYPES):
        return None if value is None else value.lower()
    raise InvalidRequestError(
        f"pooling_type is {shown(value)}, but must be None or one of {', '.join(POOLING_TYPES)}",
        "pooling_type",
    )


@answers_mistakes
@dataclass(slots=True, kw_only=True)
class PoolerSettings(CheckedFields):
    """The equivalent of vLLM's PoolerConfig."""

    checks: ClassVar[Mapping[str, Callable[[Any], Any]]] = {
        "task": _task,
        "pooling_type": _pooling_type,
    }
    aliases: ClassVar[Mapping[str, str]] = {"seq_pooling_type": "pooling_type"}
    foreign: ClassVar[CompatTable] = {
        "dimensions": ((), _CALL),
        "enable_chunked_processing": ((False,), "truncate_prompt_tokens shortens a prompt"),
        "enable_flash_late_interaction": ((False, True), "vectors are compared by the caller"),
        "max_embed_len": ((), "max_model_len is the longest prompt"),
        "tok_pooling_type": (("ALL",), "each token has a vector"),
        "use_activation": ((), _CALL),
    }

    #: The task of `LLM.encode` if a call names none; None means the model's own task. With
    #: "token_embed", `LLM.score` compares the vectors of all tokens (late interaction, as in
    #: ColBERT): it sums, over the tokens of data_1, the largest product with a token of data_2.
    task: str | None = None
    #: The engine option pooling_type.
    pooling_type: str | None = None

    def joined(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """The engine's options with these settings. Raises ConfigurationError if they conflict."""
        own, given = self.pooling_type, options.get("pooling_type")
        if own is None:
            return dict(options)
        if given is not None and str(given).lower() != own:
            raise ConfigurationError(
                f"pooling_type is {given!r}, and {own!r} in pooler_config; give one of them"
            )
        return {**options, "pooling_type": own}


@answers_mistakes
@dataclass(slots=True, kw_only=True)
class PoolingArguments(CheckedFields):
    """The equivalent of vLLM's PoolingParams."""

    checks: ClassVar[Mapping[str, Callable[[Any], Any]]] = {
        "dimensions": partial(integer, "dimensions", low=1, high=None),
        "use_activation": _use_activation,
    }
    aliases: ClassVar[Mapping[str, str]] = {
        "activation": "use_activation",
        "normalize": "use_activation",
    }
    foreign: ClassVar[CompatTable] = {
        "extra_kwargs": (({},), "no part of quire reads further arguments"),
        "late_chunking_params": ((), _CHUNKS),
        "late_interaction_params": ((), _TOKENS),
        "requires_token_ids": ((False, True), "a result always has its prompt's token ids"),
        "returned_token_ids": ((), _TOKENS),
        "skip_reading_prefix_cache": ((False,), "give each prompt a cache_salt of its own"),
        "step_tag_id": ((), _TOKENS),
        "task": ((), "the method says it: embed, classify, score, or encode(pooling_task=...)"),
    }

    #: The number of a vector's first elements that are returned (Matryoshka); None means all.
    dimensions: int | None = None
    #: Whether vectors are normalized and the head's activation is applied to scores; None means as
    #: the model's folder says.
    use_activation: bool | None = None


def pooler_settings(given: Any) -> PoolerSettings:
    """The settings in the argument pooler_config. Raises ConfigurationError."""
    if isinstance(given, PoolerSettings):
        return given
    if given is not None and not isinstance(given, Mapping):
        raise ConfigurationError(
            f"pooler_config is {given!r:.80}, but must be a PoolerConfig, or a mapping of its"
            " fields"
        )
    try:
        return PoolerSettings(**(given or {}))
    except InvalidRequestError as error:
        raise ConfigurationError(f"pooler_config: {error}") from error
