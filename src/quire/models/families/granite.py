"""Granite 3, dense: Llama with four multipliers.

By IBM (arXiv:2405.04324 and its model cards). The multipliers are

- of the embeddings, and of what each block adds to the residual stream;
- of q·k, in place of one over the root of the head size;
- of the logits, which are divided by `logits_scaling`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from quire.models.config import DecoderConfig
from quire.models.config_fields import ConfigFields


@dataclass(frozen=True, slots=True, kw_only=True)
class GraniteConfig(DecoderConfig):
    """Biases are options of the whole attention block and of the whole MLP."""

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> Self:
        fields = ConfigFields(raw)
        attention_bias = fields.flag("attention_bias", False)
        return cls.read(
            fields,
            qkv_bias=attention_bias,
            output_bias=attention_bias,
            mlp_bias=fields.flag("mlp_bias", False),
            embedding_scale=fields.number("embedding_multiplier", 1.0),
            residual_scale=fields.number("residual_multiplier", 1.0),
            attention_scale=fields.number("attention_multiplier", 1.0),
            logits_scale=1.0 / fields.number("logits_scaling", 1.0),
        )
