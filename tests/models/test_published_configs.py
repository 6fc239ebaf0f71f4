"""Configs as the hub has them, of families that differ from Llama: read as transformers reads them.

Every field that these have must be understood. `test_registry.py` has those of Llama's kin.
"""

import json
from typing import Any

import pytest
from transformers import AutoConfig

from quire.models.registry import load_config

FULL, SLIDING = "full_attention", "sliding_attention"
OF_FILES = {
    "_name_or_path": "somewhere",
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.50.0",
    "use_cache": True,
}


def _sizes(*sizes: int) -> dict[str, int]:
    """Vocabulary, hidden, MLP, layers, heads, KV heads, positions."""
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    names += ("num_attention_heads", "num_key_value_heads", "max_position_embeddings")
    return dict(zip(names, sizes, strict=True))


def _of(kind: str, model_type: str, **fields: Any) -> dict[str, Any]:
    return OF_FILES | {"architectures": [kind], "model_type": model_type} | fields


PHI_LONG = {"short_factor": [1.0] * 48, "long_factor": [1.1] * 48, "type": "longrope"}
YARN = {
    "attention_factor": 1.2079441541679836,
    "beta_fast": 32,
    "beta_slow": 1,
    "factor": 8.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "yarn",
}

PUBLISHED: dict[str, dict[str, Any]] = {
    "Gemma 2 2B": _of(
        "Gemma2ForCausalLM", "gemma2", **_sizes(256000, 2304, 9216, 26, 8, 4, 8192),
        attention_bias=False, attn_logit_softcapping=50.0, final_logit_softcapping=30.0,
        bos_token_id=2, cache_implementation="hybrid", eos_token_id=1, head_dim=256,
        hidden_act="gelu_pytorch_tanh", hidden_activation="gelu_pytorch_tanh", pad_token_id=0,
        query_pre_attn_scalar=256, rms_norm_eps=1e-06, rope_theta=10000.0, sliding_window=4096,
    ),
    "Gemma 3 1B": _of(
        "Gemma3ForCausalLM", "gemma3_text", **_sizes(262144, 1152, 6912, 26, 4, 1, 32768),
        attention_bias=False, attn_logit_softcapping=None, cache_implementation="hybrid",
        eos_token_id=[1, 106], final_logit_softcapping=None, head_dim=256,
        hidden_activation="gelu_pytorch_tanh", query_pre_attn_scalar=256, rms_norm_eps=1e-06,
        rope_local_base_freq=10000, rope_scaling=None, rope_theta=1000000, sliding_window=512,
        sliding_window_pattern=6,
    ),
    "Gemma 3 4B": _of(
        "Gemma3ForConditionalGeneration", "gemma3", boi_token_index=255999, eoi_token_index=256000,
        eos_token_id=[1, 106], image_token_index=262144, mm_tokens_per_image=256,
        text_config={
            "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text",
            "num_hidden_layers": 34, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
        vision_config={"hidden_size": 1152, "model_type": "siglip_vision_model"},
    ),
    "GLM-4 9B 0414": _of(
        "Glm4ForCausalLM", "glm4", **_sizes(151552, 4096, 13696, 40, 32, 2, 32768),
        attention_bias=True, eos_token_id=[151329, 151336], head_dim=128, hidden_act="silu",
        pad_token_id=151329, partial_rotary_factor=0.5, rms_norm_eps=1e-05, rope_theta=10000.0,
        tie_word_embeddings=False,
    ),
    "LLaVA 1.5 7B": _of(
        "LlavaForConditionalGeneration", "llava", ignore_index=-100, image_token_index=32000,
        pad_token_id=32001, projector_hidden_act="gelu", tie_word_embeddings=False,
        text_config={
            "architectures": ["LlamaForCausalLM"], "max_position_embeddings": 4096,
            "model_type": "llama", "rms_norm_eps": 1e-05, "torch_dtype": "float16",
            "vocab_size": 32064,
        },
        vision_config={
            "hidden_size": 1024, "model_type": "clip_vision_model", "num_attention_heads": 16,
        },
        vision_feature_layer=-2, vision_feature_select_strategy="default", vocab_size=32064,
    ),
    "Ministral 3 8B": _of(
        "Mistral3ForConditionalGeneration", "mistral3", image_token_index=10,
        multimodal_projector_bias=False, projector_hidden_act="gelu", spatial_merge_size=2,
        text_config=_sizes(131072, 4096, 14336, 34, 32, 8, 262144) | {
            "head_dim": 128, "hidden_act": "silu", "model_type": "ministral3",
            "rms_norm_eps": 1e-05, "sliding_window": None, "tie_word_embeddings": False,
            "rope_parameters": {
                "beta_fast": 32.0, "beta_slow": 1.0, "factor": 16.0, "llama_4_scaling_beta": 0.1,
                "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 16384,
                "rope_theta": 1000000.0, "rope_type": "yarn", "type": "yarn",
            },
        },
        vision_config={"hidden_size": 1024, "model_type": "pixtral"}, vision_feature_layer=-1,
    ),
    "Mistral Small 3.1": _of(
        "Mistral3ForConditionalGeneration", "mistral3", image_token_index=10,
        multimodal_projector_bias=False, projector_hidden_act="gelu", spatial_merge_size=2,
        text_config=_sizes(131072, 5120, 32768, 40, 32, 8, 131072) | {
            "head_dim": 128, "hidden_act": "silu", "model_type": "mistral", "rms_norm_eps": 1e-05,
            "rope_theta": 1000000000.0, "sliding_window": None, "use_cache": True,
        },
        vision_config={"hidden_size": 1024, "model_type": "pixtral"}, vision_feature_layer=-1,
    ),
    "OLMo 1B": _of(
        "OlmoForCausalLM", "olmo", **_sizes(50304, 2048, 8192, 16, 16, 16, 2048),
        attention_bias=False, clip_qkv=None, eos_token_id=50279, hidden_act="silu", pad_token_id=1,
        pretraining_tp=1, rope_scaling=None, rope_theta=10000.0, tie_word_embeddings=True,
    ),
    "OLMo 3 7B": _of(
        "Olmo3ForCausalLM", "olmo3", **_sizes(100278, 4096, 11008, 32, 32, 32, 65536),
        attention_bias=False, hidden_act="silu", layer_types=([SLIDING] * 3 + [FULL]) * 8,
        rms_norm_eps=1e-06, rope_scaling=YARN, rope_theta=500000, sliding_window=4096,
        tie_word_embeddings=False,
    ),
    "Phi-3 mini 4k": _of(
        "Phi3ForCausalLM", "phi3", **_sizes(32064, 3072, 8192, 32, 32, 32, 4096),
        attention_bias=False, auto_map={"AutoConfig": "configuration_phi3.Phi3Config"},
        embd_pdrop=0.0, hidden_act="silu", original_max_position_embeddings=4096, resid_pdrop=0.0,
        rms_norm_eps=1e-05, rope_scaling=None, rope_theta=10000.0, sliding_window=2047,
        tie_word_embeddings=False,
    ),
    "Phi-4 mini": _of(
        "Phi3ForCausalLM", "phi3", **_sizes(200064, 3072, 8192, 32, 24, 8, 131072),
        attention_bias=False, auto_map={"AutoConfig": "configuration_phi3.Phi3Config"},
        embd_pdrop=0.0, full_attn_mod=1, hidden_act="silu", interpolate_factor=1,
        lm_head_bias=False, mlp_bias=False, original_max_position_embeddings=4096,
        partial_rotary_factor=0.75, resid_pdrop=0.0, rms_norm_eps=1e-05, rope_scaling=PHI_LONG,
        rope_theta=10000.0, sliding_window=262144, tie_word_embeddings=True,
    ),
    "Qwen3-Coder 30B-A3B": _of(
        "Qwen3MoeForCausalLM", "qwen3_moe", **_sizes(151936, 2048, 5472, 48, 32, 4, 262144),
        attention_bias=False, decoder_sparse_step=1, eos_token_id=151645, head_dim=128,
        hidden_act="silu", max_window_layers=28, mlp_only_layers=[], moe_intermediate_size=768,
        norm_topk_prob=True, num_experts=128, num_experts_per_tok=8, output_router_logits=False,
        qkv_bias=False, rms_norm_eps=1e-06, rope_scaling=None, rope_theta=10000000,
        router_aux_loss_coef=0.0, shared_expert_intermediate_size=0, sliding_window=None,
        tie_word_embeddings=False, use_qk_norm=True, use_sliding_window=False,
    ),
    "Qwen3-VL 4B": _of(
        "Qwen3VLForConditionalGeneration", "qwen3_vl", image_token_id=151655,
        tie_word_embeddings=True, video_token_id=151656, vision_end_token_id=151653,
        text_config=_sizes(151936, 2560, 9728, 36, 32, 8, 262144) | {
            "attention_bias": False, "dtype": "bfloat16", "head_dim": 128, "hidden_act": "silu",
            "model_type": "qwen3_vl_text", "rms_norm_eps": 1e-06, "tie_word_embeddings": True,
            "rope_scaling": {
                "mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default",
            },
            "rope_theta": 5000000, "use_cache": True,
        },
        vision_config={"depth": 24, "hidden_size": 1024},
    ),
    "SmolLM3 3B": _of(
        "SmolLM3ForCausalLM", "smollm3", **_sizes(128256, 2048, 11008, 36, 16, 4, 65536),
        attention_bias=False, eos_token_id=128012, hidden_act="silu", layer_types=[FULL] * 36,
        max_window_layers=28, mlp_bias=False, no_rope_layer_interval=4,
        no_rope_layers=[1, 1, 1, 0] * 9, pad_token_id=128004, pretraining_tp=2, rms_norm_eps=1e-06,
        rope_scaling=None, rope_theta=5000000.0, sliding_window=None, use_sliding_window=False,
    ),
    "GPT-2": _of(
        "GPT2LMHeadModel", "gpt2", activation_function="gelu_new", attn_pdrop=0.1,
        bos_token_id=50256, embd_pdrop=0.1, eos_token_id=50256, layer_norm_epsilon=1e-05,
        n_ctx=1024, n_embd=768, n_head=12, n_layer=12, n_positions=1024, resid_pdrop=0.1,
        summary_activation=None, summary_first_dropout=0.1, summary_proj_to_labels=True,
        summary_type="cls_index", summary_use_proj=True,
        task_specific_params={"text-generation": {"do_sample": True}}, vocab_size=50257,
    ),
    "GPT-2 large": _of(
        "GPT2LMHeadModel", "gpt2", activation_function="gelu_new", layer_norm_epsilon=1e-05,
        n_ctx=1024, n_embd=1280, n_head=20, n_layer=36, n_positions=1024, n_special=0,
        predict_special_tokens=True, summary_type="cls_index", vocab_size=50257, _num_labels=1,
    ),
    "Galactica 1.3B": _of(
        "OPTForCausalLM", "opt", _remove_final_layer_norm=False, activation_dropout=0.0,
        activation_function="gelu", do_layer_norm_before=True, dropout=0.1, enable_bias=True,
        ffn_dim=8192, hidden_size=2048, init_std=0.02, layer_norm_elementwise_affine=True,
        layerdrop=0.0, learned_embeddings=True, max_position_embeddings=2048,
        num_attention_heads=32, num_hidden_layers=24, output_projection=True, pad_token_id=1,
        scale_embeddings=False, vocab_size=50000, word_embed_proj_dim=2048,
    ),
    "OPT 125M": _of(
        "OPTForCausalLM", "opt", _remove_final_layer_norm=False, activation_dropout=0.0,
        activation_function="relu", bos_token_id=2, do_layer_norm_before=True, dropout=0.1,
        eos_token_id=2, ffn_dim=3072, hidden_size=768, init_std=0.02, layerdrop=0.0,
        max_position_embeddings=2048, num_attention_heads=12, num_hidden_layers=12,
        pad_token_id=1, prefix="</s>", vocab_size=50272, word_embed_proj_dim=768,
    ),
}  # fmt: skip


@pytest.mark.parametrize("is_written_anew", [False, True], ids=["published", "transformers 5"])
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_configs_are_read_as_transformers_reads_them(name, is_written_anew, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(PUBLISHED[name]))
    whole = AutoConfig.from_pretrained(tmp_path)
    if is_written_anew:
        path.write_text(whole.to_json_string(use_diff=False))
    ours, theirs = load_config(tmp_path), whole.get_text_config()
    sizes = ("vocab_size", "hidden_size", "max_position_embeddings")
    assert [getattr(ours, size) for size in sizes] == [getattr(theirs, size) for size in sizes]
    assert (ours.num_layers, ours.num_heads) == (
        theirs.num_hidden_layers,
        theirs.num_attention_heads,
    )
    kv_heads = getattr(theirs, "num_key_value_heads", None) or theirs.num_attention_heads
    head_dim = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
    assert (ours.num_kv_heads, ours.head_dim) == (kv_heads, head_dim)
    assert (ours.wrapper is not None) == ("text_config" in PUBLISHED[name])
    rope = getattr(theirs, "rope_parameters", None)
    kinds = [rope] if rope and "rope_type" in rope else [(rope or {}).get(FULL)]
    if rope:
        assert ours.rope.rope_theta == kinds[0]["rope_theta"]
        assert ours.rope.type_name == kinds[0]["rope_type"]
        part = kinds[0].get("partial_rotary_factor", 1.0)
        assert ours.ropes[0].rotary_dim == int(head_dim * part)
    else:
        assert ours.rope is None
    window = getattr(theirs, "sliding_window", None)
    named = getattr(theirs, "layer_types", None) or [SLIDING] * ours.num_layers
    assert list(ours.windows) == [window if kind == SLIDING else None for kind in named]
