"""Phi-3, Phi-3.5 and Phi-4: Llama with fused linears in its files.

Sources: arXiv:2404.14219, arXiv:2412.08905. Their differences from Llama:

- in the files, one tensor holds q, k and v, and one holds gate and up;
- all layers have the sliding window, if the config has one;
- the rope type is LongRoPE, also under the names "su" and "yarn"; in Phi-4-mini, part of each head
  rotates.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from quire.models.checkpoints.arranged import Arrangement
from quire.models.config import DecoderConfig
from quire.models.config_fields import ROPE_FORMS, ConfigFields
from quire.models.decoder import DecoderForCausalLM
from quire.models.model_entry import ModelEntry

# transformers' values for fields that a config leaves out.
_DEFAULTS = {"rms_norm_eps": 1e-5, "original_max_position_embeddings": 4096}
_OLD_NAMES = ("su", "yarn")
# Fields about training, and options of Phi-3's own code that have no effect here.
_UNUSED = ("embd_pdrop", "resid_pdrop", "full_attn_mod", "interpolate_factor")
_BIASES = ("attention_bias", "lm_head_bias", "mlp_bias")


@dataclass(frozen=True, slots=True, kw_only=True)
class Phi3Config(DecoderConfig):
    """`sliding_window` applies to all layers."""

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> Self:
        fields = ConfigFields({**_DEFAULTS, **raw, **_renamed_rope(raw)})
        for name in _UNUSED:
            fields.value(name)
        for name in _BIASES:
            fields.plain(name, False)
        window = fields.optional_integer("sliding_window")
        num_layers = fields.integer("num_hidden_layers")
        return cls.read(fields, partial_rotary=1.0, windows=(window,) * num_layers)


def _renamed_rope(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The rope parameters, with an old name of the rope type replaced by the current name."""
    for form in ROPE_FORMS:
        rope = raw.get(form)
        if isinstance(rope, dict) and rope.get("rope_type", rope.get("type")) in _OLD_NAMES:
            return {form: {**rope, "rope_type": "longrope"}}
    return {}


def fused_linears(config: DecoderConfig) -> Arrangement:
    """The arrangement of Phi-3's linears in the files."""
    q_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return Arrangement(
        fused={
            "qkv_proj": {"q_proj": q_size, "k_proj": kv_size, "v_proj": kv_size},
            "gate_up_proj": dict.fromkeys(("gate_proj", "up_proj"), config.intermediate_size),
        }
    )


ENTRY = ModelEntry(Phi3Config, DecoderForCausalLM, arrangement=fused_linears)
