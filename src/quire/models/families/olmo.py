"""OLMo 1: Llama with LayerNorms without weights.

Source: arXiv:2402.00838. `clip_qkv`, which a few of its checkpoints have, is refused.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from quire.models.config import DecoderConfig
from quire.models.config_fields import ConfigFields, with_names
from quire.models.decoder import DecoderForCausalLM
from quire.models.model_entry import ModelEntry

_EPS = 1e-5  # as in transformers' model


@dataclass(frozen=True, slots=True, kw_only=True)
class OlmoConfig(DecoderConfig):
    """`attention_bias` applies to all four projections; the MLP has no biases."""

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> Self:
        fields = ConfigFields(with_names(raw, {}, refused=("rms_norm_eps",)))
        fields.plain("clip_qkv", None)
        return cls.read(
            fields,
            attention_bias=fields.flag("attention_bias", False),
            norm="plain layer",
            rms_norm_eps=_EPS,
        )


ENTRY = ModelEntry(OlmoConfig, DecoderForCausalLM)
