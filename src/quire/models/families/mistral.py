"""Mistral 7B and its relatives: Llama with sliding windows.

Source: arXiv:2310.06825. Its differences from Llama:

- a sliding window on every layer, 4096 where the config is silent and none where it says null;
- 8 KV heads where the config is silent, and no biases.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from quire.models.config import DecoderConfig
from quire.models.config_fields import ConfigFields

# transformers' values for fields that a config leaves out.
_DEFAULTS = {"sliding_window": 4096, "num_key_value_heads": 8}


@dataclass(frozen=True, slots=True, kw_only=True)
class MistralConfig(DecoderConfig):
    """`sliding_window` holds for all layers."""

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> Self:
        fields = ConfigFields({**_DEFAULTS, **raw})
        window = fields.optional_integer("sliding_window")
        return cls.read(fields, windows=(window,) * fields.integer("num_hidden_layers"))
