"""Translates GGUF configs and tensors of families with mixtures of experts."""

from typing import Any

from quire.errors import UnsupportedModelError
from quire.models.checkpoints.gguf.families.architecture import (
    EXPERTS,
    LAYER,
    ROPE_TENSORS,
    TOP,
    Architecture,
    decoder_config,
    has_bias,
)
from quire.models.checkpoints.gguf.families.dense import (
    biases,
    granite_fields,
    permuted_rules,
    plain_rules,
)
from quire.models.checkpoints.gguf.families.ropes import rope_parameters
from quire.models.checkpoints.gguf.gguf_model import GGUFModel
from quire.models.checkpoints.gguf.tensor_map import TensorRules

SIGMOID = 2
"""The value of expert_gating_func for a router with sigmoids; 1 means softmax."""


def _qwen3moe(model: GGUFModel) -> dict[str, Any]:
    """The config of Qwen3-MoE. As in llama.cpp, all layers have experts, and the weights of a
    token's experts are divided by their sum."""
    return decoder_config(
        model,
        "Qwen3MoeForCausalLM",
        num_experts=model.integer("expert_count"),
        num_experts_per_tok=model.integer("expert_used_count"),
        moe_intermediate_size=model.integer("expert_feed_forward_length"),
        norm_topk_prob=True,
        **biases(model, "attention_bias"),
    )


def _qwen3vlmoe(model: GGUFModel) -> dict[str, Any]:
    """The config of the language model of a Qwen3-VL mixture."""
    model.skip("rope.dimension_sections", "n_deepstack_layers")
    return _qwen3moe(model)


def _olmoe(model: GGUFModel) -> dict[str, Any]:
    """The config of OLMoE. As in llama.cpp, the weights of experts are not divided by their sum."""
    return decoder_config(
        model,
        "OlmoeForCausalLM",
        num_experts=model.integer("expert_count"),
        num_experts_per_tok=model.integer("expert_used_count"),
        norm_topk_prob=False,
        **biases(model, "attention_bias"),
    )


def _granitemoe(model: GGUFModel) -> dict[str, Any]:
    return decoder_config(
        model,
        "GraniteMoeForCausalLM",
        num_local_experts=model.integer("expert_count"),
        num_experts_per_tok=model.integer("expert_used_count"),
        **granite_fields(model),
        **biases(model, "attention_bias"),
    )


def _gpt_oss(model: GGUFModel) -> dict[str, Any]:
    """The config of gpt-oss. Files lack the limit and the multiplier of the gate, which are
    constants in llama.cpp."""
    rope = rope_parameters(model, model.integer("attention.key_length"))
    if rope["rope_type"] == "yarn":
        rope["truncate"] = False
    return decoder_config(
        model,
        "GptOssForCausalLM",
        intermediate_size=model.integer(
            "expert_feed_forward_length", model.integer("feed_forward_length", 0)
        ),
        num_local_experts=model.integer("expert_count"),
        num_experts_per_tok=model.integer("expert_used_count"),
        sliding_window=model.integer("attention.sliding_window"),
        attention_bias=has_bias(model, "attn_q"),
        rope_parameters=rope,
    )


def _gpt_oss_rules(model: GGUFModel) -> TensorRules:
    own: dict[str, str | tuple[str, ...]] = {
        "attn_sinks.weight": "self_attn.sinks",
        "post_attention_norm": "post_attention_layernorm",
    }
    return TensorRules(LAYER | EXPERTS | own, TOP, unused=ROPE_TENSORS)


def _glm4moe(model: GGUFModel) -> dict[str, Any]:
    # Files that were made before llama.cpp had this field have sigmoids, too.
    if model.integer("expert_gating_func", SIGMOID) not in (0, SIGMOID):
        raise UnsupportedModelError(
            f"{model.path}: glm4moe.expert_gating_func says that experts are not chosen by"
            " sigmoids, as GLM-4.5's are"
        )
    num_predicting = model.integer("nextn_predict_layers", 0)
    return decoder_config(
        model,
        "Glm4MoeForCausalLM",
        num_hidden_layers=model.num_layers() - num_predicting,
        num_nextn_predict_layers=num_predicting,
        n_routed_experts=model.integer("expert_count"),
        num_experts_per_tok=model.integer("expert_used_count"),
        moe_intermediate_size=model.integer("expert_feed_forward_length"),
        n_shared_experts=model.integer("expert_shared_count", 0),
        n_group=model.integer("expert_group_count", 1),
        topk_group=model.integer("expert_group_used_count", 1),
        first_k_dense_replace=model.integer("leading_dense_block_count", 0),
        routed_scaling_factor=model.number("expert_weights_scale", 1.0),
        norm_topk_prob=model.flag("expert_weights_norm", False),
        use_qk_norm="blk.0.attn_q_norm.weight" in model.tensors,
        attention_bias=has_bias(model, "attn_q"),
    )


def _glm4moe_rules(model: GGUFModel) -> TensorRules:
    norm: dict[str, str | tuple[str, ...]] = {"post_attention_norm": "post_attention_layernorm"}
    num_layers = model.num_layers() - model.integer("nextn_predict_layers", 0)
    return TensorRules(
        LAYER | EXPERTS | norm, TOP, unused=ROPE_TENSORS, num_layers=max(0, num_layers)
    )


MIXTURES = {
    "glm4moe": Architecture(_glm4moe, _glm4moe_rules),
    "gpt-oss": Architecture(_gpt_oss, _gpt_oss_rules),
    "granitemoe": Architecture(_granitemoe, permuted_rules),
    "olmoe": Architecture(_olmoe, plain_rules),
    "qwen3moe": Architecture(_qwen3moe, plain_rules),
    "qwen3vlmoe": Architecture(_qwen3vlmoe, plain_rules),
}
"""The architectures by their names in general.architecture."""
