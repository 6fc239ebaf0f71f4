"""Qwen2 and Qwen2.5: Llama with biases on q, k and v.

Sources: arXiv:2407.10671, arXiv:2412.15115. Their differences from Llama:

- q, k and v have biases, other linears have none;
- with `use_sliding_window`, some layers have a sliding window.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from quire.models.config import DecoderConfig, read_window_layers
from quire.models.config_fields import ConfigFields
from quire.models.families.llama import LlamaForCausalLM
from quire.models.model_entry import ModelEntry, headless_entry, scores_entry

# transformers' values for fields that a config leaves out.
DEFAULTS = {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28}


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen2Config(DecoderConfig):
    """The config of Qwen2. `layer_types` or `max_window_layers` set the layers with a window."""

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> Self:
        fields = ConfigFields({**DEFAULTS, **raw})
        return cls.read(fields, qkv_bias=True, windows=read_window_layers(fields))


ENTRY = ModelEntry(Qwen2Config, LlamaForCausalLM)
HEADLESS_ENTRY = headless_entry(Qwen2Config)
SCORES_ENTRY = scores_entry(Qwen2Config)
