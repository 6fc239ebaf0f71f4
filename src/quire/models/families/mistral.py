"""Mistral 7B and its relatives: Llama with sliding windows.

Source: arXiv:2310.06825. Its differences from Llama:

- every layer has a sliding window, by default 4096; null means none;
- the default is 8 KV heads, and there are no biases.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from quire.models.config import DecoderConfig
from quire.models.config_fields import ConfigFields
from quire.models.families.llama import LlamaForCausalLM
from quire.models.model_entry import ModelEntry, headless_entry, scores_entry

# transformers' values for fields that a config leaves out.
_DEFAULTS = {"sliding_window": 4096, "num_key_value_heads": 8}


@dataclass(frozen=True, slots=True, kw_only=True)
class MistralConfig(DecoderConfig):
    """`sliding_window` applies to all layers."""

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> Self:
        fields = ConfigFields({**_DEFAULTS, **raw})
        window = fields.optional_integer("sliding_window")
        return cls.read(fields, windows=(window,) * fields.integer("num_hidden_layers"))


ENTRY = ModelEntry(MistralConfig, LlamaForCausalLM)
HEADLESS_ENTRY = headless_entry(MistralConfig)
SCORES_ENTRY = scores_entry(MistralConfig)
