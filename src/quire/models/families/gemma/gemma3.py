"""The text model of Gemma 3: Gemma 2 with two rotations and q/k norms.

Source: arXiv:2503.19786. Its differences from Gemma 2:

- heads of q and k are normalised; scores have no cap, and logits have none by default;
- five layers with a window are followed by one layer without;
- layers with a window have their own rotation; only the other layers' rotation is stretched;
- the tokens of an image attend to each other in both directions. A layer's window limits how far
  back they see, but not how far ahead.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from quire.models.config import DecoderConfig
from quire.models.families.gemma.gemma2 import GemmaForCausalLM, gemma_fields, gemma_parts
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
_PATTERN, _THETA, _LOCAL_THETA = 6, 1e6, 1e4


@dataclass(frozen=True, slots=True, kw_only=True)
class Gemma3Config(DecoderConfig):
    """The config of Gemma 3. `layer_types` or `sliding_window_pattern` tells which layers have a
    window."""

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> Self:
        fields = gemma_fields(raw, {})
        fields.plain("attn_logit_softcapping", None)
        pattern = fields.integer("sliding_window_pattern", _PATTERN)
        fields.value("_sliding_window_pattern")  # transformers writes it beside layer_types
        kinds = read_layer_types(fields, lambda layer: SLIDING if (layer + 1) % pattern else FULL)
        ropes = read_layer_ropes(
            fields,
            head_dims=dict.fromkeys((FULL, SLIDING), fields.head_dim()),
            thetas={
                FULL: fields.number("rope_theta", _THETA),
                SLIDING: fields.number("rope_local_base_freq", _LOCAL_THETA),
            },
        )
        return cls.read(
            fields,
            **gemma_parts(fields),
            qk_norm="head",
            sees_ahead=True,
            windows=read_windows(fields, kinds),
            **chosen_ropes(ropes, kinds),
        )


ENTRY = ModelEntry(Gemma3Config, GemmaForCausalLM)
