"""Configs as the hub has them, of families with states or latents: every field is understood."""

import json
import math
from typing import Any

import pytest
from tests.models.test_published_configs import _of, _sizes
from transformers import AutoConfig

from quire.models.registry import load_config

MROPE = {
    "mrope_interleaved": True,
    "mrope_section": [11, 11, 10],
    "partial_rotary_factor": 0.25,
    "rope_theta": 10000000,
    "rope_type": "default",
}
DEEPSEEK_YARN = {
    "beta_fast": 32,
    "beta_slow": 1,
    "factor": 40,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
    "original_max_position_embeddings": 4096,
    "type": "yarn",
}

PUBLISHED: dict[str, dict[str, Any]] = {
    "DeepSeek-V2-Lite": _of(
        "DeepseekV2ForCausalLM", "deepseek_v2", **_sizes(102400, 2048, 10944, 27, 16, 16, 163840),
        attention_bias=False, aux_loss_alpha=0.001, auto_map={"AutoConfig": "x.Y"},
        bos_token_id=100000, eos_token_id=100001, first_k_dense_replace=1, hidden_act="silu",
        kv_lora_rank=512, moe_intermediate_size=1408, moe_layer_freq=1, n_group=1,
        n_routed_experts=64, n_shared_experts=2, norm_topk_prob=False, num_experts_per_tok=6,
        pretraining_tp=1, q_lora_rank=None, qk_nope_head_dim=128, qk_rope_head_dim=64,
        rms_norm_eps=1e-06, rope_scaling=DEEPSEEK_YARN, rope_theta=10000,
        routed_scaling_factor=1.0, scoring_func="softmax", seq_aux=True,
        tie_word_embeddings=False, topk_group=1, topk_method="greedy", v_head_dim=128,
    ),
    "DeepSeek-V3": _of(
        "DeepseekV3ForCausalLM", "deepseek_v3",
        **_sizes(129280, 7168, 18432, 61, 128, 128, 163840),
        attention_bias=False, aux_loss_alpha=0.001, bos_token_id=0, eos_token_id=1, ep_size=1,
        first_k_dense_replace=3, hidden_act="silu", kv_lora_rank=512, moe_intermediate_size=2048,
        moe_layer_freq=1, n_group=8, n_routed_experts=256, n_shared_experts=1,
        norm_topk_prob=True, num_experts_per_tok=8, num_nextn_predict_layers=1,
        pretraining_tp=1, q_lora_rank=1536, qk_nope_head_dim=128, qk_rope_head_dim=64,
        rms_norm_eps=1e-06, rope_scaling=DEEPSEEK_YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
        rope_theta=10000, routed_scaling_factor=2.5, scoring_func="sigmoid", seq_aux=True,
        tie_word_embeddings=False, topk_group=4, topk_method="noaux_tc", v_head_dim=128,
    ),
    "GLM-4.7-Flash": _of(
        "Glm4MoeLiteForCausalLM", "glm4_moe_lite",
        **_sizes(154880, 2048, 10240, 47, 20, 20, 202752),
        attention_bias=False, pad_token_id=154820, eos_token_id=[154820, 154827],
        first_k_dense_replace=1, hidden_act="silu", kv_lora_rank=512, moe_intermediate_size=1536,
        n_group=1, n_routed_experts=64, n_shared_experts=1, norm_topk_prob=True,
        num_experts_per_tok=4, num_nextn_predict_layers=1, partial_rotary_factor=1.0,
        q_lora_rank=768, qk_nope_head_dim=192, qk_rope_head_dim=64, rms_norm_eps=1e-05,
        rope_scaling=None, rope_theta=1000000, routed_scaling_factor=1.8,
        tie_word_embeddings=False, topk_group=1, topk_method="noaux_tc", v_head_dim=256,
    ),
    "Qwen3-Next 80B": _of(
        "Qwen3NextForCausalLM", "qwen3_next", **_sizes(151936, 2048, 5120, 48, 16, 2, 262144),
        attention_bias=False, bos_token_id=151643, decoder_sparse_step=1, eos_token_id=151645,
        full_attention_interval=4, head_dim=256, hidden_act="silu", linear_conv_kernel_dim=4,
        linear_key_head_dim=128, linear_num_key_heads=16, linear_num_value_heads=32,
        linear_value_head_dim=128, mlp_only_layers=[], moe_intermediate_size=512,
        norm_topk_prob=True, num_experts=512, num_experts_per_tok=10, output_router_logits=False,
        partial_rotary_factor=0.25, rms_norm_eps=1e-06, rope_scaling=None, rope_theta=10000000,
        router_aux_loss_coef=0.001, shared_expert_intermediate_size=512,
        tie_word_embeddings=False, use_sliding_window=False,
    ),
    "Qwen3.5 4B, text": _of(
        "Qwen3_5ForCausalLM", "qwen3_5_text", **_sizes(248320, 2560, 9216, 32, 16, 4, 262144),
        attention_bias=False, attn_output_gate=True, eos_token_id=248044,
        full_attention_interval=4, head_dim=256, hidden_act="silu", linear_conv_kernel_dim=4,
        linear_key_head_dim=128, linear_num_key_heads=16, linear_num_value_heads=32,
        linear_value_head_dim=128, mamba_ssm_dtype="float32", mlp_only_layers=[],
        mtp_num_hidden_layers=1, mtp_use_dedicated_embeddings=False, partial_rotary_factor=0.25,
        rms_norm_eps=1e-06, rope_parameters=MROPE, tie_word_embeddings=True,
    ),
    "Falcon-H1 0.5B": _of(
        "FalconH1ForCausalLM", "falcon_h1", **_sizes(32784, 1024, 2048, 36, 8, 2, 16384),
        attention_bias=False, attention_in_multiplier=1.0, attention_out_multiplier=0.9375,
        attn_layer_indices=None, bos_token_id=1, embedding_multiplier=5.656854249492381,
        eos_token_id=11, head_dim=64, hidden_act="silu", key_multiplier=0.390625,
        lm_head_multiplier=0.0390625, mamba_chunk_size=128, mamba_conv_bias=True,
        mamba_d_conv=4, mamba_d_head=64, mamba_d_ssm=1536, mamba_d_state=128, mamba_expand=2,
        mamba_n_groups=1, mamba_n_heads=24, mamba_norm_before_gate=False, mamba_proj_bias=False,
        mamba_rms_norm=False, mamba_use_mlp=True, mlp_bias=False, mlp_expansion_factor=8,
        mlp_multipliers=[0.8838834764831844, 0.5859375], num_logits_to_keep=1, pad_token_id=0,
        projectors_bias=False, rms_norm_eps=1e-05, rope_scaling=None, rope_theta=1e11,
        sliding_window=None, ssm_in_multiplier=1.25, ssm_out_multiplier=0.23570226039551587,
        ssm_multipliers=[0.3535, 0.25, 0.3535, 0.5, 0.3535], tie_word_embeddings=False,
        time_step_floor=0.0001, time_step_max=0.1, time_step_min=0.001, time_step_rank="auto",
    ),
    "LFM2 1.2B": _of(
        "Lfm2ForCausalLM", "lfm2", **_sizes(65536, 2048, 12288, 16, 32, 8, 128000),
        block_auto_adjust_ff_dim=True, block_dim=2048, block_ff_dim=12288,
        block_ffn_dim_multiplier=1.0, block_mlp_init_scale=1.0, block_multiple_of=256,
        block_norm_eps=1e-05, block_out_init_scale=1.0, block_use_swiglu=True,
        block_use_xavier_init=True, bos_token_id=1, conv_L_cache=3, conv_bias=False,
        conv_dim=2048, conv_dim_out=2048, conv_use_xavier_init=True, eos_token_id=7,
        full_attn_idxs=[2, 5, 8, 10, 12, 14], norm_eps=1e-05, num_heads=32, pad_token_id=0,
        rope_theta=1000000.0, tie_embedding=True, use_pos_enc=True,
    ),
    "Nemotron-H 8B": _of(
        "NemotronHForCausalLM", "nemotron_h", **_sizes(131072, 4096, 21504, 12, 32, 8, 8192),
        attention_bias=False, attention_head_dim=128, bos_token_id=1, chunk_size=128,
        conv_kernel=4, eos_token_id=2, expand=2, hidden_dropout=0.0,
        hybrid_override_pattern="M-M-M-M*-M-M", layer_norm_epsilon=1e-05, mamba_head_dim=64,
        mamba_hidden_act="silu", mamba_num_heads=128, mamba_proj_bias=False, mlp_bias=False,
        mlp_hidden_act="relu2", n_groups=8, num_logits_to_keep=1, pad_token_id=0,
        rescale_prenorm_residual=True, residual_in_fp32=False, rms_norm_eps=1e-05,
        sliding_window=None, ssm_state_size=128, tie_word_embeddings=False,
        time_step_floor=0.0001, time_step_limit=[0.0, math.inf], time_step_max=0.1,
        time_step_min=0.001, time_step_rank=256, use_bias=False, use_conv_bias=True,
        use_mamba_kernels=True,
    ),
}  # fmt: skip


@pytest.mark.parametrize("is_written_anew", [False, True], ids=["published", "transformers 5"])
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_are_understood(name, is_written_anew, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(PUBLISHED[name]))
    theirs = AutoConfig.from_pretrained(tmp_path)
    if is_written_anew:
        path.write_text(theirs.to_json_string(use_diff=False))
    ours = load_config(tmp_path)
    sizes = ("vocab_size", "hidden_size", "max_position_embeddings")
    assert [getattr(ours, size) for size in sizes] == [getattr(theirs, size) for size in sizes]
    assert ours.num_layers == theirs.num_hidden_layers
    assert ours.num_heads == theirs.num_attention_heads
    if "Nemotron" not in name:  # which has no positions
        assert ours.rope.rope_theta == theirs.rope_parameters["rope_theta"]
    assert ours.tie_word_embeddings == theirs.tie_word_embeddings
    assert ours.attention_specs
