"""Dense Qwen3: Llama with norms on the heads of q and k.

Source: arXiv:2505.09388. Its differences from Llama:

- RMSNorm normalises each head of q and k before the rotation;
- the default head size is 128;
- some layers may have a sliding window, as in Qwen2.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from quire.models.config import DecoderConfig, read_window_layers
from quire.models.config_fields import ConfigFields
from quire.models.families.llama import LlamaForCausalLM
from quire.models.families.qwen2 import DEFAULTS as QWEN2_DEFAULTS
from quire.models.model_entry import ModelEntry, headless_entry, scores_entry

_DEFAULTS = {**QWEN2_DEFAULTS, "head_dim": 128}


@dataclass(frozen=True, slots=True, kw_only=True)
class Qwen3Config(DecoderConfig):
    """The config of Qwen3. `layer_types` or `max_window_layers` set the layers with a window."""

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> Self:
        fields = ConfigFields({**_DEFAULTS, **raw})
        return cls.read(
            fields,
            attention_bias=fields.flag("attention_bias", False),
            qk_norm="head",
            windows=read_window_layers(fields),
        )


ENTRY = ModelEntry(Qwen3Config, LlamaForCausalLM)
HEADLESS_ENTRY = headless_entry(Qwen3Config)
SCORES_ENTRY = scores_entry(Qwen3Config)
