"""A tiny config of every family that is served, for tests that go over all of them.

To add a family: a line in `FAMILIES`. Sizes are odd on purpose, and whatever makes the family
unlike others is there: windows shorter than a test's prompts, rotations in part, biases.
"""

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PreTrainedConfig

# The sizes of all families' test models; a test changes what it is about.
SMALL: dict[str, Any] = {
    "vocab_size": 1013,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}

# For classes whose own ids of special tokens are beyond a small vocabulary.
SMALL_IDS: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}

PARTIAL_LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0 + 0.1 * index for index in range(12)],
    "long_factor": [1.5 + index for index in range(12)],
}

LEARNED: dict[str, Any] = SMALL_IDS | {"vocab_size": 1013, "n_positions": 64}

LOCAL_AND_GLOBAL: dict[str, Any] = {
    "full_attention": {"rope_type": "linear", "rope_theta": 3000.0, "factor": 8.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
}

GROWING_YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 7,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.3,
}

EXPERTS: dict[str, Any] = {
    "num_local_experts": 7,
    "num_experts_per_tok": 3,
}

LATENT: dict[str, Any] = {
    **SMALL,
    "num_key_value_heads": 4,
    "kv_lora_rank": 40,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 20,
    "qk_rope_head_dim": 12,
    "v_head_dim": 28,
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
}
"""Families with latent attention."""

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma2": (
        "Gemma2Config",
        SMALL
        | {"head_dim": 24, "sliding_window": 7, "query_pre_attn_scalar": 48}
        | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0},
    ),
    "gemma3": (
        "Gemma3TextConfig",
        SMALL
        | {"head_dim": 24, "sliding_window": 5, "query_pre_attn_scalar": 48}
        | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
        | {"rope_parameters": LOCAL_AND_GLOBAL},
    ),
    "gemma4": (
        "Gemma4TextConfig",
        SMALL
        | {"vocab_size_per_layer_input": 1013, "num_hidden_layers": 6, "num_kv_shared_layers": 2}
        | {"head_dim": 24, "global_head_dim": 40, "num_global_key_value_heads": 1}
        | {"attention_k_eq_v": True, "hidden_size_per_layer_input": 8, "use_double_wide_mlp": True}
        | {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2}
        | {"sliding_window": 5, "final_logit_softcapping": 5.0},
    ),
    "gemma4-moe": (
        "Gemma4TextConfig",
        SMALL
        | {"vocab_size_per_layer_input": 1013, "hidden_size_per_layer_input": 0}
        | {"head_dim": 24, "global_head_dim": 40, "sliding_window": 5}
        | {"layer_types": ["sliding_attention", "full_attention", "full_attention"]}
        | {"enable_moe_block": True, "num_experts": 5, "top_k_experts": 2}
        | {"moe_intermediate_size": 40},
    ),
    "glm": ("GlmConfig", SMALL | {"head_dim": 24, **SMALL_IDS}),
    "glm4": ("Glm4Config", SMALL | {"head_dim": 24, **SMALL_IDS}),
    "gpt2": ("GPT2Config", LEARNED | {"n_embd": 48, "n_head": 4, "n_layer": 3, "n_inner": 100}),
    "granite": (
        "GraniteConfig",
        SMALL
        | {
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.1,
            "logits_scaling": 0.25,
        },
    ),
    "llama": ("LlamaConfig", SMALL | {"head_dim": 24, "attention_bias": True}),
    "ministral": (
        "MinistralConfig",
        SMALL
        | {"sliding_window": 9, "head_dim": 24}
        | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
    ),
    "ministral3": (
        "Ministral3Config",
        SMALL | SMALL_IDS | {"head_dim": 24, "sliding_window": 17, "rope_parameters": GROWING_YARN},
    ),
    "mistral": ("MistralConfig", SMALL | {"sliding_window": 9, "head_dim": 24}),
    "olmo": ("OlmoConfig", SMALL | {"attention_bias": True}),
    "olmo2": ("Olmo2Config", SMALL | {"tie_word_embeddings": True}),
    "olmo3": ("Olmo3Config", SMALL | {"sliding_window": 5, "num_hidden_layers": 4}),
    "opt": (
        "OPTConfig",
        {"vocab_size": 1013, "max_position_embeddings": 64, "hidden_size": 48, "ffn_dim": 100}
        | {"num_attention_heads": 4, "num_hidden_layers": 3}
        | SMALL_IDS,
    ),
    "phi3": (
        "Phi3Config",
        SMALL
        | SMALL_IDS
        | {"num_attention_heads": 2, "sliding_window": 13}
        | {"original_max_position_embeddings": 16, "rope_parameters": PARTIAL_LONGROPE},
    ),
    "qwen2": (
        "Qwen2Config",
        SMALL | {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3Config", SMALL | {"head_dim": 24}),
    "deepseek_v2": (
        "DeepseekV2Config",
        LATENT
        | {
            "q_lora_rank": None,
            "first_k_dense_replace": 1,
            "topk_method": "group_limited_greedy",
            "n_group": 3,
            "topk_group": 2,
            "n_shared_experts": 2,
            "routed_scaling_factor": 1.5,
        },
    ),
    "deepseek_v3, dense": (
        "DeepseekV3Config",
        LATENT
        | {
            "first_k_dense_replace": 3,
            "n_group": 1,
            "topk_group": 1,
            "rope_interleave": False,
            "q_lora_rank": None,
        },
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        LATENT
        | {
            "first_k_dense_replace": 1,
            "n_group": 3,
            "topk_group": 2,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
                "mscale": 0.8,
                "mscale_all_dim": 0.6,
                "beta_fast": 32,
                "beta_slow": 1,
            },
        },
    ),
    "glm4_moe_lite": (
        "Glm4MoeLiteConfig",
        LATENT | {"mlp_layer_types": ["dense", "sparse", "dense"], "attention_bias": True},
    ),
    "falcon_h1": (
        "FalconH1Config",
        SMALL
        | {
            "mamba_d_ssm": 96,
            "mamba_n_heads": 6,
            "mamba_n_groups": 2,
            "mamba_d_state": 20,
            "embedding_multiplier": 2.5,
            "lm_head_multiplier": 0.6,
            "key_multiplier": 0.7,
            "attention_in_multiplier": 1.2,
            "attention_out_multiplier": 0.8,
            "ssm_in_multiplier": 1.3,
            "ssm_out_multiplier": 0.6,
            "mlp_multipliers": [0.9, 0.7],
            "ssm_multipliers": [0.8, 1.1, 0.6, 0.9, 0.5],
        },
    ),
    "nemotron_h": (
        "NemotronHConfig",
        SMALL
        | {
            "num_hidden_layers": 4,
            "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"],
            "head_dim": 24,
            "mamba_num_heads": 6,
            "mamba_head_dim": 16,
            "n_groups": 2,
            "ssm_state_size": 20,
        },
    ),
    "lfm2": (
        "Lfm2Config",
        SMALL
        | {
            "num_hidden_layers": 4,
            "layer_types": ["conv", "conv", "full_attention", "conv"],
            "block_multiple_of": 8,
            "conv_bias": True,
        },
    ),
    "qwen3_next": (
        "Qwen3NextConfig",
        SMALL
        | {
            "head_dim": 24,
            "layer_types": ["linear_attention", "linear_attention", "full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 12,
            "linear_value_head_dim": 32,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40,
            "mlp_only_layers": [1],
        },
    ),
    "qwen3_5_moe": (
        "Qwen3_5MoeTextConfig",
        SMALL
        | {
            "head_dim": 24,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 24,
            "linear_value_head_dim": 16,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40,
        },
    ),
    "qwen3_5": (
        "Qwen3_5TextConfig",
        SMALL
        | {
            "head_dim": 24,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 24,
            "linear_value_head_dim": 16,
        },
    ),
    "smollm3": (
        "SmolLM3Config",
        SMALL
        | SMALL_IDS
        | {"no_rope_layers": [0, 1, 0], "head_dim": 24}
        | {"use_sliding_window": True, "sliding_window": 6},
    ),
    "stablelm": (
        "StableLmConfig",
        SMALL | SMALL_IDS | {"use_qkv_bias": True, "layer_norm_eps": 1e-5},
    ),
    "glm4-moe": (
        "Glm4MoeConfig",
        SMALL
        | {"num_experts_per_tok": 3, "moe_intermediate_size": 40}
        | {"n_routed_experts": 12, "n_group": 3, "topk_group": 2, "routed_scaling_factor": 1.7}
        | {"n_shared_experts": 2, "use_qk_norm": True, "head_dim": 24},
    ),
    "gpt-oss": (
        "GptOssConfig",
        SMALL | EXPERTS | {"head_dim": 24, "sliding_window": 11, "swiglu_limit": 0.9},
    ),
    "granite-moe": (
        "GraniteMoeConfig",
        SMALL | EXPERTS | {"residual_multiplier": 0.4, "attention_multiplier": 0.1},
    ),
    "mixtral": ("MixtralConfig", SMALL | EXPERTS | {"sliding_window": 11}),
    "olmoe": ("OlmoeConfig", SMALL | {"num_experts": 7, "num_experts_per_tok": 3}),
    "qwen3-moe": (
        "Qwen3MoeConfig",
        SMALL
        | EXPERTS
        | {"moe_intermediate_size": 40, "decoder_sparse_step": 2, "head_dim": 24}
        | {"num_hidden_layers": 4},
    ),
}
"""Name -> (the name of transformers' class of configs, all fields that it is given)."""


def make_config(name: str, **changes: Any) -> PreTrainedConfig:
    """transformers' config of a family, with other fields where a test changes them."""
    class_name, fields = FAMILIES[name]
    config: PreTrainedConfig = getattr(transformers, class_name)(**(fields | changes))
    return config


def save_wide(name: str, folder: Path) -> None:
    """Save a model of a family with random weights, drawn wide, so that logits lie apart."""
    torch.manual_seed(len(name))
    lengths = {"max_position_embeddings": 256, "bos_token_id": None, "eos_token_id": 1}
    model = AutoModelForCausalLM.from_config(make_config(name, **lengths, pad_token_id=0))
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            parameter.normal_(0, 0.15)
            if "norm" in parameter_name:
                parameter += 1
    model.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 1}))
