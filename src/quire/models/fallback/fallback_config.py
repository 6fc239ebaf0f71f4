"""The config of a model computed by a class of transformers. Called by `models.registry`."""

import importlib.metadata
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from quire.attention.interface import AttentionSpec
from quire.errors import CheckpointError
from quire.models.config import ModelConfig, read_dtype
from quire.models.config_bounds import checked_integer
from quire.models.config_fields import ConfigFields
from quire.models.fallback.hf_classes import find_class
from quire.models.fallback.trace import trace


@dataclass(frozen=True, slots=True, kw_only=True)
class FallbackConfig(ModelConfig):
    """The config of a model computed by a class of transformers."""

    #: The fields of config.json.
    raw: Mapping[str, Any]
    transformers_version: str
    #: The specs of the attention layers.
    specs: tuple[AttentionSpec, ...]
    #: The embedding's name in the checkpoint. The embedding may be tied to the head.
    embedding: str
    #: The head's name in the checkpoint.
    head: str

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> Self:
        hf_config, kind = find_class(raw)
        traced = trace(hf_config, kind)
        text = hf_config.get_text_config()
        widest = max(traced.specs, key=lambda spec: spec.num_heads * spec.head_dim)
        return cls(
            architecture=kind.__name__,
            vocab_size=traced.vocab_size,
            hidden_size=traced.hidden_size,
            intermediate_size=getattr(text, "intermediate_size", None) or 0,
            num_layers=len(traced.specs),
            num_heads=widest.num_heads,
            num_kv_heads=widest.num_kv_heads,
            head_dim=widest.head_dim,
            max_position_embeddings=_max_positions(text),
            dtype=read_dtype(ConfigFields(raw)),
            tie_word_embeddings=traced.is_tied,
            raw=dict(raw),
            transformers_version=importlib.metadata.version("transformers"),
            specs=traced.specs,
            embedding=traced.embedding,
            head=traced.head,
        )

    @property
    def attention_specs(self) -> tuple[AttentionSpec, ...]:
        return self.specs

    @property
    def position_origin(self) -> str:
        return "as its config.json says"

    def why_not_split(self, num_ranks: int) -> str | None:
        if num_ranks == 1:
            return None
        return "a model that a class of transformers computes runs on one rank only"


def _max_positions(text: Any) -> int:
    found = getattr(text, "max_position_embeddings", None)
    if found is None:
        raise CheckpointError("config.json has no max_position_embeddings; give it by hf_overrides")
    return checked_integer("config.json: max_position_embeddings", "max_position_embeddings", found)
