"""Translates GGUF configs and tensors of Gemma 2, 3 and 4.

In files of Gemma 2 and 3, llama.cpp has added 1 to the weights of norms. The model adds 1, too, so
this module subtracts 1. Files lack the scale of attention scores, so the scale of published models
is used.
"""

from typing import Any

import torch

from quire.errors import UnsupportedModelError
from quire.models.checkpoints.gguf.families.architecture import (
    LAYER,
    ROPE_TENSORS,
    TOP,
    Architecture,
    decoder_config,
    has_bias,
)
from quire.models.checkpoints.gguf.families.dense import layer_types, sliding_layers
from quire.models.checkpoints.gguf.families.ropes import rope_parameters
from quire.models.checkpoints.gguf.gguf_model import GGUFModel
from quire.models.checkpoints.gguf.tensor_map import EXPERT, TensorRules

_NORMS: dict[str, str | tuple[str, ...]] = {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_LARGEST = {"gemma2": 46, "gemma3": 62}
"""Number of layers of the 27B models. Their attention scores are not scaled by the head's size."""
_SOFT_CAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
"""The soft caps of all published models of Gemma 2. The first GGUF files of Gemma 2 lack them."""
_PATTERN = 6
_LOCAL_THETA = 10000.0
_NOT_TURNED = 1e29
"""Frequencies with a divisor of this size or more are not rotated."""


def _score_size(model: GGUFModel) -> int:
    """The config field query_pre_attn_scalar. Scores are divided by its square root."""
    num_heads, num_layers = model.integer("attention.head_count"), model.num_layers()
    hidden_size = model.integer("embedding_length")
    if num_layers == _LARGEST[model.architecture]:
        return hidden_size // max(1, num_heads)
    return model.integer("attention.key_length", hidden_size // max(1, num_heads))


def _soft_cap(model: GGUFModel, field: str, default: float = 0.0) -> float | None:
    return model.number(field, default) or None


def _gemma2(model: GGUFModel) -> dict[str, Any]:
    config = decoder_config(
        model,
        "Gemma2ForCausalLM",
        query_pre_attn_scalar=_score_size(model),
        sliding_window=model.integer("attention.sliding_window", 4096),
        attention_bias=has_bias(model, "attn_q"),
    )
    return config | {name: _soft_cap(model, name, cap) for name, cap in _SOFT_CAPS.items()}


def _gemma3(model: GGUFModel) -> dict[str, Any]:
    size = _score_size(model)
    window = model.integer("attention.sliding_window", 0)
    head_dim = model.integer("attention.key_length", size)
    config = decoder_config(
        model,
        "Gemma3ForCausalLM",
        query_pre_attn_scalar=size,
        attention_bias=has_bias(model, "attn_q"),
        final_logit_softcapping=_soft_cap(model, "final_logit_softcapping"),
        rope_parameters=_two_ropes(model, rope_parameters(model, head_dim)),
    )
    if not window:
        return config | {"layer_types": layer_types([0] * model.num_layers())}
    slides = sliding_layers(model, _PATTERN)
    return config | {"sliding_window": window, "layer_types": layer_types(slides)}


def _two_ropes(model: GGUFModel, of_full: dict[str, Any]) -> dict[str, Any]:
    """The rotations by kind of layer. `of_full` is the rotation of layers without a window."""
    theta = model.number("rope.freq_base_swa", _LOCAL_THETA)
    return {
        "full_attention": of_full,
        "sliding_attention": {"rope_type": "default", "rope_theta": theta},
    }


def _gemma_rules(model: GGUFModel) -> TensorRules:
    norms = ("attn_norm", "attn_q_norm", "attn_k_norm", "output_norm", *_NORMS)
    return TensorRules(
        LAYER | _NORMS,
        TOP,
        changes={f"{name}.weight": _without_one for name in norms},
        unused=ROPE_TENSORS,
    )


def _without_one(weights: torch.Tensor) -> torch.Tensor:
    return weights - 1


_GEMMA4_LAYER: dict[str, str | tuple[str, ...]] = {
    "layer_output_scale.weight": "layer_scalar",
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
    "ffn_gate_inp": "router.proj",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_down_exps.scale": "router.per_expert_scale",
    "ffn_down_exps": f"experts.{EXPERT}.down_proj",
    "ffn_gate_exps": f"experts.{EXPERT}.gate_proj",
    "ffn_up_exps": f"experts.{EXPERT}.up_proj",
    "ffn_gate_up_exps": tuple(f"experts.{EXPERT}.{part}_proj" for part in ("gate", "up")),
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
}
_GEMMA4_TOP = {
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}


def _gemma4(model: GGUFModel) -> dict[str, Any]:
    # First, read the fields that differ between layers.
    num_layers = model.num_layers()
    slides = model.integers("attention.sliding_window_pattern")
    heads = dict(zip(slides, model.integers("attention.head_count_kv"), strict=True))
    size = model.integer("attention.key_length")
    num_shared = model.integer("attention.shared_kv_layers", 0)
    # The only difference allowed: MLPs of layers with shared keys and values are twice as wide.
    widths = model.integers("feed_forward_length")
    is_double = len(set(widths)) > 1
    if is_double and widths != [
        widths[0] * (1 + (n >= num_layers - num_shared)) for n in range(num_layers)
    ]:
        raise UnsupportedModelError(
            f"{model.path}: gemma4.feed_forward_length differs between layers, but only the layers "
            "that read other layers' keys may differ, by MLPs of twice the size"
        )
    # Layers without a window have no v projection if their values equal their keys.
    full = [layer for layer in range(num_layers - num_shared) if not slides[layer]]
    num_experts = model.integer("expert_count", 0)
    config = decoder_config(
        model,
        "Gemma4ForCausalLM",
        intermediate_size=widths[0],
        use_double_wide_mlp=is_double,
        head_dim=model.integer("attention.key_length_swa", size),
        global_head_dim=size,
        num_key_value_heads=heads.get(1, heads.get(0)),
        num_global_key_value_heads=heads.get(0, heads.get(1)),
        attention_k_eq_v=any(f"blk.{layer}.attn_v.weight" not in model.tensors for layer in full),
        num_kv_shared_layers=num_shared,
        hidden_size_per_layer_input=model.integer("embedding_length_per_layer_input", 0),
        vocab_size_per_layer_input=model.shape("token_embd.weight")[0],
        sliding_window=model.integer("attention.sliding_window"),
        layer_types=layer_types(slides),
        final_logit_softcapping=_soft_cap(model, "final_logit_softcapping"),
        rope_parameters=_gemma4_ropes(model),
        enable_moe_block=bool(num_experts),
        use_bidirectional_attention=_gemma4_direction(model),
    )
    # The remaining fields are redundant, or belong to the experts of a model without experts.
    model.skip("attention.value_length_swa", "expert_feed_forward_length", "expert_used_count")
    model.skip("rope.dimension_count", "rope.dimension_count_swa")
    if num_experts:
        config["num_experts"] = num_experts
        config["top_k_experts"] = model.integer("expert_used_count")
        config["moe_intermediate_size"] = model.integer("expert_feed_forward_length")
    return config


def _gemma4_direction(model: GGUFModel) -> str | None:
    """The value of use_bidirectional_attention, which GGUF files lack. The published models have
    "vision", except the small ones, which have embeddings for each layer."""
    is_small = model.integer("embedding_length_per_layer_input", 0) > 0
    return None if is_small else "vision"


def _gemma4_ropes(model: GGUFModel) -> dict[str, Any]:
    """The rotations of Gemma 4. Layers without a window rotate the first part of each head, with
    the frequencies of the whole head."""
    factors = model.small_numbers("rope_freqs.weight")
    turned = sum(factor < _NOT_TURNED for factor in factors)
    full: dict[str, Any] = {
        "rope_type": "proportional",
        "rope_theta": model.number("rope.freq_base"),
        "partial_rotary_factor": turned / len(factors) if factors else 1.0,
    }
    if any(factor not in (1.0, 1e30) for factor in factors):
        raise UnsupportedModelError(
            f"{model.path}: rope_freqs.weight has values other than 1 (for elements that rotate)"
            " and 1e30 (for elements that don't)"
        )
    return _two_ropes(model, full)


def _gemma4_rules(model: GGUFModel) -> TensorRules:
    return TensorRules(LAYER | _NORMS | _GEMMA4_LAYER, TOP | _GEMMA4_TOP, unused=ROPE_TENSORS)


GEMMA = {
    "gemma2": Architecture(_gemma2, _gemma_rules),
    "gemma3": Architecture(_gemma3, _gemma_rules),
    "gemma4": Architecture(_gemma4, _gemma4_rules),
}
"""The architectures by their names in general.architecture."""
