"""OPT and Galactica: learned positions, LayerNorm, and MLPs with ReLU.

Sources: arXiv:2205.01068, arXiv:2211.09085. Their differences from Llama:

- each position has a learned vector, which is added to the token's embedding; the table in the
  files begins with two unused vectors;
- LayerNorm, by default biases everywhere, ReLU between two linears, and a tied head.

OPT-350M, with norms after blocks and embeddings narrower than its layers, is refused.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from quire.models.checkpoints.arranged import Arrangement
from quire.models.config import DecoderConfig
from quire.models.config_fields import ConfigFields, with_names
from quire.models.decoder import DecoderForCausalLM
from quire.models.model_entry import QKV_PARTS, ModelEntry

_OUR_NAMES = {"activation_function": "hidden_act", "ffn_dim": "intermediate_size"}
_DEFAULTS = {"tie_word_embeddings": True}
_EPS = 1e-5  # torch's default, which transformers' model uses
_UNUSED = ("activation_dropout", "dropout", "init_std", "layerdrop")  # fields of training
# Fields of published configs that transformers ignores.
_OF_TRAINING_CODE = {
    "learned_embeddings": True,
    "output_projection": True,
    "scale_embeddings": False,
}
_NUM_SPARE_POSITIONS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class OPTConfig(DecoderConfig):
    """`enable_bias` applies to all linears."""

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> Self:
        named = with_names({**_DEFAULTS, **raw}, _OUR_NAMES, refused=("rms_norm_eps",))
        fields = ConfigFields(named)
        for name in _UNUSED:
            fields.value(name)
        fields.plain("do_layer_norm_before", True)
        fields.plain("_remove_final_layer_norm", False)
        for name, value in _OF_TRAINING_CODE.items():
            fields.plain(name, value)
        fields.plain("word_embed_proj_dim", fields.integer("hidden_size"))
        has_bias = fields.flag("enable_bias", True)
        has_weights = fields.flag("layer_norm_elementwise_affine", True)
        return cls.read(
            fields,
            activations=("relu", "gelu", "gelu_new"),
            rope=None,
            norm="layer" if has_weights else "plain layer",
            rms_norm_eps=_EPS,
            is_gated=False,
            qkv_bias=has_bias,
            output_bias=has_bias,
            mlp_bias=has_bias,
        )


_WORDS = {
    "self_attn_layer_norm": "input_layernorm",
    "final_layer_norm": "post_attention_layernorm",
    "out_proj": "o_proj",
    "fc1": "mlp.up_proj",
    "fc2": "mlp.down_proj",
}


def rename_opt(name: str) -> str:
    """Map a tensor's name, with or without transformers' prefix, to its name in the model."""
    if name.startswith("lm_head."):
        return name
    words = name.removeprefix("model.").removeprefix("decoder.").split(".")
    if words[0] == "final_layer_norm":
        words[0] = "norm"
    return ".".join(["model", *(_WORDS.get(word, word) for word in words)])


def spare_positions(config: DecoderConfig) -> Arrangement:
    """The arrangement of OPT's table of positions in the files."""
    table = {"": _NUM_SPARE_POSITIONS, "embed_positions": config.max_position_embeddings}
    return Arrangement(fused={"embed_positions": table})


ENTRY = ModelEntry(
    OPTConfig, DecoderForCausalLM, QKV_PARTS, rename=rename_opt, arrangement=spare_positions
)
