"""GPT-2: learned positions, LayerNorm and an MLP without a gate.

Source: Radford et al., "Language Models are Unsupervised Multitask Learners" (2019). Its
differences from Llama:

- each position has a learned vector, which is added to the token's embedding; nothing is rotated;
- LayerNorm, biases everywhere, GELU by tanh between two linears, and a tied head;
- q, k and v are one tensor in the files, and linears are stored as [inputs, outputs].
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from quire.models.checkpoints.arranged import Arrangement
from quire.models.config import DecoderConfig
from quire.models.config_fields import ConfigFields, with_names
from quire.models.decoder import DecoderForCausalLM
from quire.models.model_entry import QKV_PARTS, ModelEntry

_OUR_NAMES = {
    "activation_function": "hidden_act",
    "layer_norm_epsilon": "rms_norm_eps",
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
    "n_layer": "num_hidden_layers",
    "n_positions": "max_position_embeddings",
}
_ALIASES = ("hidden_size", "num_attention_heads", "num_hidden_layers", "max_position_embeddings")
_DEFAULTS = {"layer_norm_epsilon": 1e-5, "tie_word_embeddings": True}
# Fields about training, unsupported heads, and how transformers rounds scores.
_UNUSED = (
    *("attn_pdrop", "embd_pdrop", "resid_pdrop", "n_ctx", "reorder_and_upcast_attn"),
    *("summary_activation", "summary_first_dropout", "summary_proj_to_labels"),
    *("summary_type", "summary_use_proj", "gradient_checkpointing", "predict_special_tokens"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GPT2Config(DecoderConfig):
    """The config of GPT-2. The default of n_inner is 4 times the hidden size."""

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> Self:
        named = with_names({**_DEFAULTS, **raw}, _OUR_NAMES, also=_ALIASES)
        fields = ConfigFields(named)
        if fields.value("intermediate_size") is None:
            named["intermediate_size"] = 4 * fields.integer("hidden_size")
        for name in _UNUSED:
            fields.value(name)
        fields.plain("n_special", 0)
        fields.plain("scale_attn_by_inverse_layer_idx", False)
        return cls.read(
            fields,
            activations=("gelu_new", "gelu", "gelu_pytorch_tanh", "relu"),
            rope=None,
            norm="layer",
            is_gated=False,
            qkv_bias=True,
            output_bias=True,
            mlp_bias=True,
            attention_scale=None if fields.flag("scale_attn_weights", True) else 1.0,
        )


_WORDS = {
    "h": "layers",
    "ln_1": "input_layernorm",
    "ln_2": "post_attention_layernorm",
    "ln_f": "norm",
    "wte": "embed_tokens",
    "wpe": "embed_positions",
    "attn": "self_attn",
    "c_attn": "qkv_proj",
    "c_fc": "up_proj",
}
_MASKS = (".attn.bias", ".attn.masked_bias")


def rename_gpt2(name: str) -> str | None:
    """Map a tensor's name, with or without transformers' prefix, to its name in the model. Returns
    None for the masks that old files have."""
    name = name.removeprefix("transformer.")
    if name.endswith(_MASKS):
        return None
    if name.startswith("lm_head."):
        return name
    words = name.split(".")
    ends = {"c_proj": "o_proj" if "attn" in words else "down_proj"}
    return ".".join(["model", *((_WORDS | ends).get(word, word) for word in words)])


def transposed_linears(config: DecoderConfig) -> Arrangement:
    """The arrangement of GPT-2's linears in the files."""
    return Arrangement(
        fused={"qkv_proj": dict.fromkeys(("q_proj", "k_proj", "v_proj"), config.hidden_size)},
        transposed=frozenset({"qkv_proj", "o_proj", "up_proj", "down_proj"}),
    )


ENTRY = ModelEntry(
    GPT2Config,
    DecoderForCausalLM,
    QKV_PARTS,
    rename=rename_gpt2,
    arrangement=transposed_linears,
)
