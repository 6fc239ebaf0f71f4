"""Llama 1 to 3: the decoder of `models.decoder` unchanged.

Sources: arXiv:2302.13971, arXiv:2407.21783. Llama is a pre-norm decoder with RMSNorm, rotary
positions, grouped-query attention and a SwiGLU MLP. The files of other families list their
differences from Llama.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from quire.models.config import DecoderConfig
from quire.models.config_fields import ConfigFields
from quire.models.decoder import DecoderForCausalLM
from quire.models.model_entry import ModelEntry, headless_entry, scores_entry


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig(DecoderConfig):
    """`attention_bias` applies to all linears of attention, `mlp_bias` to those of the MLP."""

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> Self:
        fields = ConfigFields(raw)
        mlp_bias = fields.flag("mlp_bias", False)
        return cls.read(
            fields, attention_bias=fields.flag("attention_bias", False), mlp_bias=mlp_bias
        )


class LlamaForCausalLM(DecoderForCausalLM):
    """A decoder without changes."""


ENTRY = ModelEntry(LlamaConfig, LlamaForCausalLM)
HEADLESS_ENTRY = headless_entry(LlamaConfig)
SCORES_ENTRY = scores_entry(LlamaConfig)
