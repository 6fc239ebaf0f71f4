"""Translates GGUF configs and tensors of Llama and other dense decoders."""

from typing import Any

import numpy as np
import torch

from quire.models.checkpoints.gguf.families.architecture import (
    EXPERTS,
    LAYER,
    ROPE_TENSORS,
    TOP,
    Architecture,
    decoder_config,
    has_bias,
    permuted,
    weights_dtype,
)
from quire.models.checkpoints.gguf.families.ropes import rope_parameters
from quire.models.checkpoints.gguf.gguf_model import GGUFModel
from quire.models.checkpoints.gguf.tensor_map import TensorRules

_BIASES = {"attention_bias": "attn_q", "mlp_bias": "ffn_down"}
_FUSED_MLP: dict[str, str | tuple[str, ...]] = {"ffn_up": "mlp.gate_up_proj"}
_GLM_NORMS: dict[str, str | tuple[str, ...]] = {
    "post_attention_norm": "post_self_attn_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
}
_NORMS_BEHIND: dict[str, str | tuple[str, ...]] = {
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


def plain_rules(model: GGUFModel) -> TensorRules:
    """The rules for models whose tensors, except experts, are stored as in the checkpoint."""
    return TensorRules(LAYER | EXPERTS, TOP, unused=ROPE_TENSORS)


def permuted_rules(model: GGUFModel) -> TensorRules:
    """The rules for models whose q and k llama.cpp reorders, as it does for Llama."""
    return TensorRules(LAYER | EXPERTS, TOP, order=permuted(model), unused=ROPE_TENSORS)


def biases(model: GGUFModel, *fields: str) -> dict[str, bool]:
    """For each of the given config fields, whether the linears it concerns have biases."""
    return {field: has_bias(model, _BIASES[field]) for field in fields}


def _llama(model: GGUFModel) -> dict[str, Any]:
    """The config of Llama, Mixtral or Mistral. Files don't name Mistral's sliding window."""
    num_experts = model.integer("expert_count", 0)
    if num_experts:
        return decoder_config(
            model,
            "MixtralForCausalLM",
            num_local_experts=num_experts,
            num_experts_per_tok=model.integer("expert_used_count"),
        )
    return decoder_config(model, "LlamaForCausalLM", **biases(model, "attention_bias", "mlp_bias"))


def _mistral3(model: GGUFModel) -> dict[str, Any]:
    """The config of Ministral 3, or of Mistral Small 3, which has the same class as Mistral."""
    if not model.has("attention.temperature_scale"):
        return decoder_config(model, "MistralForCausalLM") | {"sliding_window": None}
    rope = rope_parameters(model, model.integer("attention.key_length"), log_multiplier=1.0)
    rope["llama_4_scaling_beta"] = model.number("attention.temperature_scale")
    config = decoder_config(model, "Ministral3ForCausalLM", rope_parameters=rope)
    return config | {"sliding_window": None}


def _qwen2(model: GGUFModel) -> dict[str, Any]:
    return decoder_config(model, "Qwen2ForCausalLM")


def _qwen3(model: GGUFModel) -> dict[str, Any]:
    return decoder_config(model, "Qwen3ForCausalLM", **biases(model, "attention_bias"))


def _qwen2vl(model: GGUFModel) -> dict[str, Any]:
    """The config of the language model of Qwen2-VL and Qwen2.5-VL. The rotation's sections (time,
    height, width) are ignored: a text token has the same position on all axes."""
    model.skip("rope.dimension_sections")
    return _qwen2(model)


def _qwen3vl(model: GGUFModel) -> dict[str, Any]:
    """The config of the language model of Qwen3-VL. The deepstack layers concern images only."""
    model.skip("rope.dimension_sections", "n_deepstack_layers")
    return _qwen3(model)


def _smollm3(model: GGUFModel) -> dict[str, Any]:
    """The config of SmolLM3. As in llama.cpp, every fourth layer ignores positions."""
    return decoder_config(model, "SmolLM3ForCausalLM", **biases(model, "attention_bias"))


def _phi3(model: GGUFModel) -> dict[str, Any]:
    length = model.integer("rope.scaling.original_context_length", 4096)
    window = model.integer("attention.sliding_window", 0)
    return decoder_config(
        model,
        "Phi3ForCausalLM",
        original_max_position_embeddings=length,
        sliding_window=window or None,
    )


def _phi3_rules(model: GGUFModel) -> TensorRules:
    fused: dict[str, str | tuple[str, ...]] = {"attn_qkv": "self_attn.qkv_proj"}
    return TensorRules(LAYER | _FUSED_MLP | fused, TOP, unused=ROPE_TENSORS)


def _glm4(model: GGUFModel) -> dict[str, Any]:
    return decoder_config(model, "Glm4ForCausalLM", attention_bias=has_bias(model, "attn_q"))


def _glm(model: GGUFModel) -> dict[str, Any]:
    return decoder_config(
        model,
        "GlmForCausalLM",
        attention_bias=has_bias(model, "attn_q") or has_bias(model, "attn_qkv"),
    )


def _glm_rules(model: GGUFModel) -> TensorRules:
    """The rules for GLM-4. Files made from its first checkpoints have one tensor for q, k and v."""
    num_heads = model.integer("attention.head_count")
    size = model.integer("embedding_length") // max(1, num_heads)
    kv_size = size * model.integer("attention.head_count_kv", num_heads)
    fused: dict[str, str | tuple[str, ...]] = {
        "attn_qkv": tuple(f"self_attn.{part}_proj" for part in "qkv")
    }
    return TensorRules(
        LAYER | _FUSED_MLP | _GLM_NORMS | fused,
        TOP,
        sizes={"attn_qkv": (size * num_heads, kv_size, kv_size)},
        unused=ROPE_TENSORS,
    )


def granite_fields(model: GGUFModel) -> dict[str, Any]:
    """The config fields of Granite's multipliers."""
    return {
        "embedding_multiplier": model.number("embedding_scale", 1.0),
        "residual_multiplier": model.number("residual_scale", 1.0),
        "attention_multiplier": model.number("attention.scale"),
        "logits_scaling": model.number("logit_scale", 1.0),
    }


def _granite(model: GGUFModel) -> dict[str, Any]:
    fields = granite_fields(model) | biases(model, "attention_bias", "mlp_bias")
    return decoder_config(model, "GraniteForCausalLM", **fields)


def _olmo(model: GGUFModel) -> dict[str, Any]:
    model.skip("attention.layer_norm_epsilon")  # a constant of OLMo
    clip = model.number("attention.clamp_kqv", 0.0)
    return decoder_config(
        model,
        "OlmoForCausalLM",
        rms_norm_eps=None,
        clip_qkv=clip or None,
        **biases(model, "attention_bias"),
    )


def _olmo_rules(model: GGUFModel) -> TensorRules:
    """The rules for OLMo. Weights of q and k are reordered, but their biases are not."""
    order = {f"{name}.weight": rows for name, rows in permuted(model).items()}
    return TensorRules(LAYER, TOP, order=order, unused=ROPE_TENSORS)


def _olmo2(model: GGUFModel) -> dict[str, Any]:
    """The config of OLMo 2 or OLMo 3. In OLMo 3, only layers without a window stretch rotations."""
    window = model.integer("attention.sliding_window", 0)
    attention = biases(model, "attention_bias")
    if not window:
        return decoder_config(model, "Olmo2ForCausalLM", **attention)
    num_heads = model.integer("attention.head_count")
    rope = rope_parameters(model, model.integer("embedding_length") // max(1, num_heads))
    theta = model.number("rope.freq_base_swa", rope["rope_theta"])
    return decoder_config(
        model,
        "Olmo3ForCausalLM",
        sliding_window=window,
        layer_types=layer_types(sliding_layers(model, 4)),
        rope_parameters={
            "full_attention": rope,
            "sliding_attention": {"rope_type": "default", "rope_theta": theta},
        },
        **attention,
    )


def _olmo2_rules(model: GGUFModel) -> TensorRules:
    return TensorRules(LAYER | _NORMS_BEHIND, TOP, unused=ROPE_TENSORS)


def _stablelm(model: GGUFModel) -> dict[str, Any]:
    """The config of StableLM. As in llama.cpp, layers without a second norm are parallel. The field
    use_parallel_residual is ignored, as the converter sets it for all models."""
    model.skip("use_parallel_residual")
    return decoder_config(
        model,
        "StableLmForCausalLM",
        rms_norm_eps=None,
        layer_norm_eps=model.number("attention.layer_norm_epsilon"),
        use_parallel_residual="blk.0.ffn_norm.weight" not in model.tensors,
        use_qkv_bias=has_bias(model, "attn_q"),
        qk_layernorm="blk.0.attn_q_norm.weight" in model.tensors,
    )


def sliding_layers(model: GGUFModel, period: int) -> list[int]:
    """For each layer, 1 if it has a sliding window, otherwise 0.

    The metadata field holds this list, or a period: the last layer of every `period` layers has no
    window. A period of 0 means that all layers have a window. The argument `period` is the default
    if the field is missing.
    """
    field = "attention.sliding_window_pattern"
    if isinstance(model.metadata.get(f"{model.architecture}.{field}"), np.ndarray):
        return model.integers(field)
    period = model.integer(field, period)
    return [int(period == 0 or (layer + 1) % period != 0) for layer in range(model.num_layers())]


def layer_types(slides: list[int]) -> list[str]:
    """The config's names for layers with a window (1 in `slides`) and without (0)."""
    return ["sliding_attention" if each else "full_attention" for each in slides]


def _gpt2(model: GGUFModel) -> dict[str, Any]:
    return {
        "architectures": ["GPT2LMHeadModel"],
        "dtype": weights_dtype(model),
        "vocab_size": model.shape("token_embd.weight")[0],
        "n_embd": model.integer("embedding_length"),
        "n_head": model.integer("attention.head_count"),
        "n_inner": model.integer("feed_forward_length"),
        "n_layer": model.num_layers(),
        "n_positions": model.integer("context_length"),
        "layer_norm_epsilon": model.number("attention.layer_norm_epsilon"),
    }


def _gpt2_rules(model: GGUFModel) -> TensorRules:
    """The rules for GPT-2. Linears are [inputs, outputs] in the checkpoint, but not in the file."""
    linears = {
        "attn_qkv": "attn.c_attn",
        "attn_output": "attn.c_proj",
        "ffn_up": "mlp.c_fc",
        "ffn_down": "mlp.c_proj",
    }
    top = {"token_embd": "wte", "position_embd": "wpe", "output_norm": "ln_f"}
    return TensorRules(
        {"attn_norm": "ln_1", "ffn_norm": "ln_2", **linears},
        top | {"output": "lm_head"},
        changes={f"{name}.weight": torch.t for name in linears},
        prefix="h.",
    )


DENSE = {
    "chatglm": Architecture(_glm, _glm_rules),
    "glm4": Architecture(_glm4, _glm_rules),
    "gpt2": Architecture(_gpt2, _gpt2_rules),
    "granite": Architecture(_granite, permuted_rules),
    "llama": Architecture(_llama, permuted_rules),
    "mistral3": Architecture(_mistral3, permuted_rules),
    "olmo": Architecture(_olmo, _olmo_rules),
    "olmo2": Architecture(_olmo2, _olmo2_rules),
    "phi3": Architecture(_phi3, _phi3_rules),
    "qwen2": Architecture(_qwen2, plain_rules),
    "qwen2vl": Architecture(_qwen2vl, plain_rules),
    "qwen3": Architecture(_qwen3, plain_rules),
    "qwen3vl": Architecture(_qwen3vl, plain_rules),
    "smollm3": Architecture(_smollm3, permuted_rules),
    "stablelm": Architecture(_stablelm, plain_rules),
}
"""Architectures by their names in general.architecture."""
