"""Translates GGUF configs and tensors of DeepSeek-V2, DeepSeek-V3 and GLM-4.7-Flash.

llama.cpp uses one architecture for them. It stores the projections from the latent to keys and to
values as two tensors of stacked heads. The tensor for keys is transposed. Older files have one
tensor for both.
"""

from typing import Any

import torch

from quire.errors import UnsupportedModelError
from quire.hub.gguf.header import broken
from quire.models.checkpoints.gguf.families.architecture import (
    EXPERTS,
    LAYER,
    ROPE_TENSORS,
    TOP,
    Architecture,
    decoder_config,
    has_bias,
)
from quire.models.checkpoints.gguf.families.mixtures import SIGMOID
from quire.models.checkpoints.gguf.families.ropes import rope_parameters
from quire.models.checkpoints.gguf.gguf_model import GGUFModel
from quire.models.checkpoints.gguf.tensor_locations import Combined
from quire.models.checkpoints.gguf.tensor_map import TensorRules

_ATTENTION: dict[str, str | tuple[str, ...]] = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
}


_GROUPS = {(60, 160): (8, 3), (61, 256): (8, 4)}
"""Maps (number of layers, number of experts) of DeepSeek-V2 and V3 to (number of expert groups,
number of groups that a token may use), which files from before autumn 2025 lack."""


def _size(model: GGUFModel) -> tuple[int, int]:
    """(number of layers, number of experts), without the layers that predict further tokens."""
    num_layers = model.num_layers() - model.integer("nextn_predict_layers", 0)
    return num_layers, model.integer("expert_count")


def _sizes(model: GGUFModel) -> tuple[int, int, int]:
    """(size of a key's unrotated part, size of its rotated part, size of a value) per head."""
    key = model.integer("attention.key_length_mla", model.integer("attention.key_length"))
    value = model.integer("attention.value_length_mla", model.integer("attention.value_length"))
    turned = model.integer("rope.dimension_count")
    if turned >= key:
        raise broken(model.path, f"{turned} numbers of a key of {key} would rotate")
    return key - turned, turned, value


def _config(model: GGUFModel) -> dict[str, Any]:
    """The config of V3 if the router has biases, otherwise the config of V2."""
    has_sigmoids = any(name.endswith(".exp_probs_b.bias") for name in model.tensors)
    if has_sigmoids != (model.integer("expert_gating_func", 1 + has_sigmoids) == SIGMOID):
        raise UnsupportedModelError(
            f"{model.path}: deepseek2.expert_gating_func and the router's biases match neither "
            "DeepSeek-V2 nor DeepSeek-V3"
        )
    nope, turned, value = _sizes(model)
    num_predicting = model.integer("nextn_predict_layers", 0)
    # The fields of the router, which depend on the groups of experts.
    scaled: dict[str, Any] = {"norm_topk_prob": model.flag("expert_weights_norm", False)}
    num_groups, num_used = _GROUPS.get(_size(model), (1, 1))
    groups = {
        "n_group": model.integer("expert_group_count", num_groups),
        "topk_group": model.integer("expert_group_used_count", num_used),
    }
    if not has_sigmoids:
        by_group = groups["n_group"] > 1
        scaled["topk_method"] = "group_limited_greedy" if by_group else "greedy"
    # The remaining fields, which V2 and V3 share.
    config = decoder_config(
        model,
        "DeepseekV3ForCausalLM" if has_sigmoids else "DeepseekV2ForCausalLM",
        head_dim=turned,
        num_key_value_heads=model.integer("attention.head_count"),
        num_hidden_layers=model.num_layers() - num_predicting,
        kv_lora_rank=model.integer("attention.kv_lora_rank"),
        qk_nope_head_dim=nope,
        qk_rope_head_dim=turned,
        v_head_dim=value,
        n_routed_experts=model.integer("expert_count"),
        num_experts_per_tok=model.integer("expert_used_count"),
        moe_intermediate_size=model.integer("expert_feed_forward_length"),
        n_shared_experts=model.integer("expert_shared_count", 0),
        first_k_dense_replace=model.integer("leading_dense_block_count", 0),
        routed_scaling_factor=model.number("expert_weights_scale", 1.0),
        attention_bias=has_bias(model, "attn_output"),
        rope_parameters=rope_parameters(model, turned),
        **groups,
        **scaled,
    )
    model.skip("attention.head_count_kv", "rope.scaling.yarn_log_multiplier")
    if has_sigmoids:
        config["num_nextn_predict_layers"] = num_predicting
    return config | {"q_lora_rank": model.integer("attention.q_lora_rank", 0) or None}


def _rules(model: GGUFModel) -> TensorRules:
    nope, _, value = _sizes(model)
    num_heads = model.integer("attention.head_count")
    latent = model.integer("attention.kv_lora_rank")
    num_layers = model.num_layers() - model.integer("nextn_predict_layers", 0)

    def joined(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return torch.cat((keys.transpose(1, 2), values), 1)

    heads = Combined(
        ("attn_k_b.weight", "attn_v_b.weight"),
        (num_heads * (nope + value), latent),
        nope + value,
        joined,
    )
    return TensorRules(
        LAYER | EXPERTS | _ATTENTION,
        TOP,
        combined={"self_attn.kv_b_proj.weight": heads},
        unused=ROPE_TENSORS,
        num_layers=max(0, num_layers),
    )


LATENT = {"deepseek2": Architecture(_config, _rules)}
"""The architectures by their names in general.architecture."""
