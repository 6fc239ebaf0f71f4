"""Dense Granite 3: Llama with four multipliers.

By IBM (arXiv:2405.04324 and its model cards). The multipliers apply to

- the embeddings, and each block's output before it is added to the residual stream;
- q·k, instead of 1 / sqrt(head size);
- the logits, which are divided by `logits_scaling`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from quire.models.config import DecoderConfig
from quire.models.config_fields import ConfigFields
from quire.models.decoder import DecoderForCausalLM
from quire.models.model_entry import ModelEntry, headless_entry


@dataclass(frozen=True, slots=True, kw_only=True)
class GraniteConfig(DecoderConfig):
    """`attention_bias` applies to all linears of attention, `mlp_bias` to those of the MLP."""

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> Self:
        fields = ConfigFields(raw)
        return cls.read(
            fields,
            attention_bias=fields.flag("attention_bias", False),
            mlp_bias=fields.flag("mlp_bias", False),
            embedding_scale=fields.number("embedding_multiplier", 1.0),
            residual_scale=fields.number("residual_multiplier", 1.0),
            attention_scale=fields.number("attention_multiplier", 1.0),
            logits_scale=1.0 / fields.number("logits_scaling", 1.0),
        )


ENTRY = ModelEntry(GraniteConfig, DecoderForCausalLM)
HEADLESS_ENTRY = headless_entry(GraniteConfig)
