"""What a call that embeds or classifies may say, as vLLM's scripts say it.

Knows no model: `PoolingInputs` checks the bounds. Called by `pooling_engine`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from quire.core.checked_fields import CheckedFields, answers_mistakes
from quire.core.foreign_sampling import Foreign
from quire.errors import InvalidRequestError, shown

_TOKENS = "LLM.encode(pooling_task='token_embed') has the vectors of all tokens"
_CHUNKS = "cut a text where its chunks shall begin, and embed each"


def _dimensions(value: Any) -> int | None:
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value > 0):
        return value
    raise InvalidRequestError(
        f"dimensions is {shown(value)}, but must be None or a number above 0", "dimensions"
    )


def _use_activation(value: Any) -> bool | None:
    if value is None or isinstance(value, bool):
        return value
    raise InvalidRequestError(
        f"use_activation is {shown(value)}, but must be True, False or None", "use_activation"
    )


@answers_mistakes
@dataclass(slots=True, kw_only=True)
class PoolingArguments(CheckedFields):
    """vLLM's PoolingParams.

    dimensions: only so many elements of a vector, the first ones (Matryoshka). use_activation:
        whether a vector is normalised, and scores go through the activation of their head; None: as
        the model's folder says.
    """

    checks: ClassVar[Mapping[str, Callable[[Any], Any]]] = {
        "dimensions": _dimensions,
        "use_activation": _use_activation,
    }
    aliases: ClassVar[Mapping[str, str]] = {
        "activation": "use_activation",
        "normalize": "use_activation",
    }
    foreign: ClassVar[Foreign] = {
        "extra_kwargs": (({},), "no part of quire reads further arguments"),
        "late_chunking_params": ((), _CHUNKS),
        "late_interaction_params": ((), _TOKENS),
        "requires_token_ids": ((False, True), "a result always has its prompt's token ids"),
        "returned_token_ids": ((), _TOKENS),
        "skip_reading_prefix_cache": ((False,), "give each prompt a cache_salt of its own"),
        "step_tag_id": ((), _TOKENS),
        "task": ((), "the method says it: embed, classify, score, or encode(pooling_task=...)"),
    }

    dimensions: int | None = None
    use_activation: bool | None = None
