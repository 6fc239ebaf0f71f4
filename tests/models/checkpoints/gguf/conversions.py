"""Models that are converted in tests: one or more of every architecture that is read."""

from tests.models.checkpoints.gguf.conversion import Conversion, permute_heads
from tests.models.checkpoints.gguf.converters import (
    delta_fields,
    delta_net,
    gemma4,
    gemma4_fields,
    glm4_moe,
    glm4_moe_fields,
    gpt_oss_experts,
    granite_experts,
    granite_fields,
    latent_fields,
    llama_experts,
    mamba_fields,
    nemotron_states,
    olmo3_fields,
    olmo_heads,
    phi3_factors,
    phi3_fields,
    plain_experts,
    qwen35_fields,
    rope_freqs,
    shifted_norms,
    split_heads,
    stablelm_fields,
    states,
    tiled_values,
    transposed,
    turned_quarter,
    whole_heads,
    without_pooler,
)
from tests.models.family_shapes import PARTIAL_LONGROPE

LLAMA_3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
OTHER_LLAMA_3 = LLAMA_3 | {"high_freq_factor": 8.0, "original_max_position_embeddings": 2048}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
ONES = {
    "head_dim": 16,
    "mamba_rms_norm": True,
    "mamba_norm_before_gate": False,
    "mlp_multipliers": [1.0, 1.0],
    "ssm_multipliers": [1.0] * 5,
    **{
        f"{name}_multiplier": 1.0
        for name in ("embedding", "lm_head", "key", "attention_in", "attention_out", "ssm_in")
    },
    "ssm_out_multiplier": 1.0,
}
"""Falcon-H1's multipliers, which are within the weights of a converted model."""
ALIKE_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
    "mscale": 0.8,
    "mscale_all_dim": 0.8,
    "beta_fast": 32,
    "beta_slow": 1,
}
FACTORS = PARTIAL_LONGROPE | {"short_factor": [1.0 + 0.25 * index for index in range(12)]}
EXPERT_FIELDS = (
    *("expert_count", "expert_used_count", "expert_group_count", "expert_group_used_count"),
)
BERT = {
    "vocab_size": 101,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 80,
    "max_position_embeddings": 40,
}

CONVERSIONS = {
    "bert": Conversion(
        "bert",
        "bert",
        BERT,
        fields=lambda config: {
            "attention.layer_norm_epsilon": config.layer_norm_eps,
            "attention.causal": False,
            "pooling_type": 2,
        },
        modify=without_pooler,
    ),
    "llama": Conversion(
        "llama",
        "llama",
        fields=lambda config: {"vocab_size": config.vocab_size, "rope.dimension_count": 24},
        modify=permute_heads,
    ),
    "llama, tied": Conversion(
        "llama", "llama", {"tie_word_embeddings": True}, modify=permute_heads
    ),
    "llama 3": Conversion(
        "llama",
        "llama",
        {"attention_bias": False, "head_dim": 32, "rope_parameters": LLAMA_3},
        modify=permute_heads,
        extra=rope_freqs,
    ),
    "llama, linear": Conversion(
        "llama", "llama", {"rope_parameters": LINEAR}, modify=permute_heads
    ),
    "qwen2": Conversion("qwen2", "qwen2", {"use_sliding_window": False}),
    "qwen2-vl": Conversion(
        "qwen2",
        "qwen2vl",
        {"use_sliding_window": False},
        fields=lambda config: {"rope.dimension_sections": [16, 24, 24, 0]},
    ),
    "qwen3": Conversion("qwen3", "qwen3", {"tie_word_embeddings": True}),
    "qwen3-vl": Conversion(
        "qwen3",
        "qwen3vl",
        fields=lambda config: {"rope.dimension_sections": [24, 20, 20], "n_deepstack_layers": 3},
    ),
    "qwen3-vl-moe": Conversion(
        "qwen3-moe",
        "qwen3vlmoe",
        {"decoder_sparse_step": 1, "norm_topk_prob": True},
        fields=lambda config: {
            "expert_feed_forward_length": config.moe_intermediate_size,
            "rope.dimension_sections": [24, 20, 20],
            "n_deepstack_layers": 3,
        },
        modify=plain_experts,
    ),
    "stablelm": Conversion("stablelm", "stablelm", fields=stablelm_fields),
    "stablelm, parallel": Conversion(
        "stablelm", "stablelm", {"use_parallel_residual": True}, fields=stablelm_fields
    ),
    "qwen3, last token": Conversion(
        "qwen3", "qwen3", {"tie_word_embeddings": True}, fields=lambda config: {"pooling_type": 3}
    ),
    "qwen3, yarn": Conversion("qwen3", "qwen3", {"rope_parameters": YARN}),
    "mixtral": Conversion("mixtral", "llama", {"sliding_window": None}, modify=llama_experts),
    "ministral 3": Conversion(
        "ministral3",
        "mistral3",
        {"sliding_window": None},
        fields=lambda config: {
            "rope.scaling.yarn_log_multiplier": config.rope_parameters["mscale_all_dim"],
            "attention.temperature_scale": config.rope_parameters["llama_4_scaling_beta"],
        },
        modify=permute_heads,
    ),
    "mistral small 3": Conversion(
        "mistral", "mistral3", {"sliding_window": None}, modify=permute_heads
    ),
    "smollm3": Conversion(
        "smollm3",
        "smollm3",
        {"no_rope_layers": [1, 1, 1], "use_sliding_window": False, "sliding_window": None},
        modify=permute_heads,
    ),
    "phi3": Conversion(
        "phi3", "phi3", {"rope_parameters": FACTORS}, fields=phi3_fields, extra=phi3_factors
    ),
    "glm4": Conversion(
        "glm4", "glm4", fields=lambda config: {"rope.dimension_count": config.head_dim // 2}
    ),
    "glm": Conversion(
        "glm",
        "chatglm",
        {"head_dim": 16},
        fields=lambda config: {
            "rope.dimension_count": 8,
            "attention.key_length": None,
            "attention.value_length": None,
        },
    ),
    "granite": Conversion("granite", "granite", fields=granite_fields, modify=permute_heads),
    "granite-moe": Conversion(
        "granite-moe", "granitemoe", fields=granite_fields, modify=granite_experts
    ),
    "olmo": Conversion(
        "olmo",
        "olmo",
        fields=lambda config: {"attention.layer_norm_epsilon": 1e-5},
        modify=olmo_heads,
    ),
    "olmo2": Conversion("olmo2", "olmo2"),
    "olmo3": Conversion("olmo3", "olmo2", fields=olmo3_fields),
    "olmoe": Conversion("olmoe", "olmoe", modify=plain_experts),
    "gpt2": Conversion(
        "gpt2",
        "gpt2",
        fields=lambda config: {
            "feed_forward_length": config.n_inner,
            "attention.layer_norm_epsilon": config.layer_norm_epsilon,
        },
        modify=transposed,
    ),
    "gemma2": Conversion(
        "gemma2",
        "gemma2",
        {"query_pre_attn_scalar": 24},
        fields=lambda config: {
            "attn_logit_softcapping": config.attn_logit_softcapping,
            "final_logit_softcapping": config.final_logit_softcapping,
            "attention.sliding_window": config.sliding_window,
        },
        modify=shifted_norms,
    ),
    "gemma3": Conversion(
        "gemma3",
        "gemma3",
        {"query_pre_attn_scalar": 24, "num_hidden_layers": 7, "layer_types": None},
        fields=lambda config: {
            "attention.sliding_window": config.sliding_window,
            "rope.freq_base_swa": 100.0,
        },
        modify=shifted_norms,
    ),
    "gemma4": Conversion(
        "gemma4", "gemma4", fields=gemma4_fields, modify=gemma4, extra=turned_quarter
    ),
    "gemma4-moe": Conversion(
        "gemma4-moe",
        "gemma4",
        fields=gemma4_fields,
        modify=gemma4,
        extra=turned_quarter,
        unlike={"sees_ahead": True},
    ),
    "qwen3-moe": Conversion(
        "qwen3-moe",
        "qwen3moe",
        {"decoder_sparse_step": 1, "norm_topk_prob": True},
        fields=lambda config: {"expert_feed_forward_length": config.moe_intermediate_size},
        modify=plain_experts,
    ),
    "gpt-oss": Conversion(
        "gpt-oss",
        "gpt-oss",
        {"swiglu_limit": 7.0},
        fields=lambda config: {
            "attention.sliding_window": config.sliding_window,
            "expert_feed_forward_length": config.intermediate_size,
        },
        modify=gpt_oss_experts,
    ),
    "glm4-moe": Conversion(
        "glm4-moe",
        "glm4moe",
        fields=glm4_moe_fields,
        modify=glm4_moe,
        unlike={"num_predicting_layers": 0},
    ),
    "deepseek_v2": Conversion("deepseek_v2", "deepseek2", fields=latent_fields, modify=split_heads),
    "deepseek_v2, older": Conversion(
        "deepseek_v2",
        "deepseek2",
        fields=lambda config: (
            latent_fields(config)
            | {
                "attention.key_length": config.qk_nope_head_dim + config.qk_rope_head_dim,
                "attention.value_length": config.v_head_dim,
                "attention.key_length_mla": None,
                "attention.value_length_mla": None,
            }
        ),
        modify=whole_heads,
    ),
    "deepseek_v3": Conversion(
        "deepseek_v3",
        "deepseek2",
        {"rope_parameters": ALIKE_YARN},
        fields=lambda config: (
            latent_fields(config)
            | {"rope.scaling.yarn_log_multiplier": 0.1 * config.rope_parameters["mscale_all_dim"]}
        ),
        modify=split_heads,
        unlike={"num_predicting_layers": 0},
    ),
    "falcon_h1": Conversion(
        "falcon_h1",
        "falcon-h1",
        ONES,
        fields=lambda config: mamba_fields(config, (6, 16, 2, 20)),
        modify=states,
    ),
    "lfm2": Conversion(
        "lfm2",
        "lfm2",
        {"conv_bias": False, "block_auto_adjust_ff_dim": False},
        fields=lambda config: {
            "attention.layer_norm_rms_epsilon": config.norm_eps,
            "attention.head_count_kv": [0, 0, 2, 0],
            "shortconv.l_cache": config.conv_L_cache,
            "vocab_size": config.vocab_size,
        },
        modify=lambda name, tensor, config: [
            (name, tensor.squeeze(1) if "conv.conv" in name else tensor)
        ],
    ),
    "nemotron_h": Conversion(
        "nemotron_h",
        "nemotron_h",
        fields=lambda config: (
            mamba_fields(config, (6, 16, 2, 20))
            | {
                "attention.layer_norm_rms_epsilon": config.layer_norm_epsilon,
                "feed_forward_length": [0, 96, 0, 0],
                "attention.head_count_kv": [0, 0, 2, 0],
                **dict.fromkeys(EXPERT_FIELDS),
            }
        ),
        modify=nemotron_states,
    ),
    "qwen3_next": Conversion(
        "qwen3_next", "qwen3next", {"mlp_only_layers": []}, fields=delta_fields, modify=delta_net
    ),
    "qwen3_5": Conversion("qwen3_5", "qwen35", fields=qwen35_fields, modify=tiled_values),
    "qwen3_5_moe": Conversion(
        "qwen3_5_moe", "qwen35moe", fields=qwen35_fields, modify=tiled_values
    ),
}
