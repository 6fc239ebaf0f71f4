"""OLMo 3: OLMo 2 with sliding windows.

Source: https://allenai.org/papers/olmo3. Its differences from OLMo 2:

- by default, three of four layers have a sliding window;
- a rope type that stretches the context applies only to the layers with full attention.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from quire.models.config import DecoderConfig
from quire.models.config_fields import ConfigFields
from quire.models.families.olmo2 import Olmo2ForCausalLM
from quire.models.layer_kinds import (
    FULL,
    SLIDING,
    chosen_ropes,
    read_layer_ropes,
    read_layer_types,
    read_windows,
)
from quire.models.model_entry import ModelEntry

# transformers' values for fields that a config leaves out.
_DEFAULTS = {"rms_norm_eps": 1e-5, "sliding_window": 4096}
_THETA = 500000.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Olmo3Config(DecoderConfig):
    """`attention_bias` applies to all four projections; the MLP has no biases."""

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> Self:
        fields = ConfigFields({**_DEFAULTS, **raw})
        kinds = read_layer_types(fields, lambda layer: SLIDING if (layer + 1) % 4 else FULL)
        ropes = read_layer_ropes(
            fields,
            head_dims=dict.fromkeys((FULL, SLIDING), fields.head_dim()),
            # In the form of transformers 4, rope_theta applies to layers with full attention.
            thetas={FULL: fields.number("rope_theta", _THETA), SLIDING: _THETA},
        )
        return cls.read(
            fields,
            attention_bias=fields.flag("attention_bias", False),
            qk_norm="width",
            norm_offset=0.0,
            windows=read_windows(fields, kinds),
            **chosen_ropes(ropes, kinds),
        )


ENTRY = ModelEntry(Olmo3Config, Olmo2ForCausalLM)
