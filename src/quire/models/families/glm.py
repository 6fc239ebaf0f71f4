"""GLM-4: Llama, but half of each head rotates, in pairs of neighbouring elements.

Sources: arXiv:2406.12793, and the model cards of GLM-4-0414. Their differences from Llama:

- half of each head rotates by default; in the files, elements 2i and 2i + 1 rotate together, so the
  outputs of q and k are reordered when they are loaded;
- gate and up are one tensor in the files; q, k and v have biases by default;
- the defaults are a head size of 128 and 2 KV heads;
- GLM-4-0414 (`glm4`) has norms before and after attention and MLP.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from quire.models.checkpoints.arranged import Arrangement, from_pairs
from quire.models.checkpoints.renamed import with_words
from quire.models.config import DecoderConfig
from quire.models.config_fields import ConfigFields
from quire.models.decoder import DecoderForCausalLM
from quire.models.layer_shapes import SandwichLayer
from quire.models.model_entry import ModelEntry

# transformers' values for fields that a config leaves out.
_DEFAULTS = {"head_dim": 128, "num_key_value_heads": 2, "rms_norm_eps": 1.5625e-7}
_ROTATES = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class GlmConfig(DecoderConfig):
    """The config of GLM-4. `attention_bias` applies to q, k and v."""

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> Self:
        fields = ConfigFields({**_DEFAULTS, **raw})
        bias = fields.flag("attention_bias", True)
        return cls.read(fields, partial_rotary=_ROTATES, qkv_bias=bias)


class Glm4ForCausalLM(DecoderForCausalLM):
    """A decoder of layers with norms before and after each block."""

    layer_type = SandwichLayer


rename_glm4 = with_words(
    {
        "post_self_attn_layernorm": "post_attention_layernorm",
        "post_attention_layernorm": "pre_feedforward_layernorm",
        "post_mlp_layernorm": "post_feedforward_layernorm",
    }
)


def neighbouring_pairs(config: DecoderConfig) -> Arrangement:
    """The arrangement of GLM-4's linears in the files."""
    size, rotary_dim = config.head_dim, config.rotary_dim or config.head_dim
    return Arrangement(
        fused={"gate_up_proj": dict.fromkeys(("gate_proj", "up_proj"), config.intermediate_size)},
        order={
            "q_proj": from_pairs(config.num_heads, size, rotary_dim),
            "k_proj": from_pairs(config.num_kv_heads, size, rotary_dim),
        },
    )


ENTRY = ModelEntry(GlmConfig, DecoderForCausalLM, arrangement=neighbouring_pairs)
GLM4_ENTRY = ModelEntry(
    GlmConfig, Glm4ForCausalLM, rename=rename_glm4, arrangement=neighbouring_pairs
)
