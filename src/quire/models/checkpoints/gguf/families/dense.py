"""Llama and its dense relatives: config and tensors."""

from typing import Any

from quire.models.checkpoints.gguf.families.architecture import (
    EXPERTS,
    LAYER,
    ROPE_TENSORS,
    TOP,
    Architecture,
    decoder_config,
    has_bias,
    permuted,
)
from quire.models.checkpoints.gguf.gguf_model import GGUFModel
from quire.models.checkpoints.gguf.tensor_map import TensorRules


def _llama_config(model: GGUFModel) -> dict[str, Any]:
    """Llama's, Mistral's, whose window no file names, or Mixtral's."""
    if model.integer("expert_count", 0):
        return decoder_config(
            model,
            "MixtralForCausalLM",
            num_local_experts=model.integer("expert_count"),
            num_experts_per_tok=model.integer("expert_used_count"),
        )
    biases = {"attention_bias": "attn_q", "mlp_bias": "ffn_down"}
    return decoder_config(
        model,
        "LlamaForCausalLM",
        **{field: has_bias(model, name) for field, name in biases.items()},
    )


def _permuted_rules(model: GGUFModel) -> TensorRules:
    return TensorRules(LAYER | EXPERTS, TOP, order=permuted(model), unused=ROPE_TENSORS)


def _plain_rules(model: GGUFModel) -> TensorRules:
    return TensorRules(LAYER, TOP, unused=ROPE_TENSORS)


def _qwen2_config(model: GGUFModel) -> dict[str, Any]:
    return decoder_config(model, "Qwen2ForCausalLM")


def _qwen3_config(model: GGUFModel) -> dict[str, Any]:
    return decoder_config(model, "Qwen3ForCausalLM", attention_bias=has_bias(model, "attn_q"))


DENSE = {
    "llama": Architecture(_llama_config, _permuted_rules),
    "qwen2": Architecture(_qwen2_config, _plain_rules),
    "qwen3": Architecture(_qwen3_config, _plain_rules),
}
