"""Qwen3.5, dense and of experts, against transformers."""

import pytest
from transformers import Qwen3_5MoeTextConfig, Qwen3_5TextConfig

from quire.errors import CheckpointError, UnsupportedModelError
from quire.models.families.hybrids.qwen3_5 import Qwen35Config, Qwen35MoeConfig

SIZES = {
    "num_hidden_layers": 5,
    "head_dim": 24,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention"] * 2
    + ["full_attention", "linear_attention"]
    + ["full_attention"],
}
SHAPES = {
    "two value heads to a key head": {},
    "as many value heads as key heads": {"linear_num_key_heads": 4, "linear_conv_kernel_dim": 3},
    "biases, tied": {"attention_bias": True, "tie_word_embeddings": True},
    "half of a head rotates": {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e6,
            "partial_rotary_factor": 0.5,
            "mrope_section": [2, 2, 2],
            "mrope_interleaved": True,
        }
    },
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_logits_equal_transformers(shape, save_checkpoint, assert_same_logits):
    folder, reference = save_checkpoint(Qwen3_5TextConfig, **(SIZES | shape))
    assert_same_logits(folder, reference)


EXPERTS = {
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 40,
}


def test_logits_of_experts_equal_transformers(save_checkpoint, assert_same_logits):
    folder, reference = save_checkpoint(Qwen3_5MoeTextConfig, **(SIZES | EXPERTS))
    assert_same_logits(folder, reference)


def test_silent_fields_of_experts_have_transformers_values():
    config = Qwen35MoeConfig.from_hf(
        {name: RAW[name] for name in RAW.keys() - {"intermediate_size", "num_key_value_heads"}}
    )
    silent = Qwen3_5MoeTextConfig()
    assert config.num_kv_heads == silent.num_key_value_heads
    assert config.mixtures is not None
    (mixture,) = set(config.mixtures)
    assert mixture.router.num_experts == silent.num_experts
    assert mixture.router.top_k == silent.num_experts_per_tok
    assert mixture.intermediate_size == silent.moe_intermediate_size
    assert mixture.shared_size == silent.shared_expert_intermediate_size


RAW = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def test_silent_fields_have_transformers_values():
    raw = {name: RAW[name] for name in RAW if name != "num_key_value_heads"}
    config = Qwen35Config.from_hf(raw)
    silent = Qwen3_5TextConfig(**{name: raw[name] for name in raw if name != "architectures"})
    assert config.num_kv_heads == silent.num_key_value_heads
    assert list(config.layer_types) == silent.layer_types
    assert config.head_dim == silent.head_dim
    assert config.rotary_dim == silent.head_dim * silent.rope_parameters["partial_rotary_factor"]
    assert config.conv_width == silent.linear_conv_kernel_dim
    assert config.delta.num_k_heads == silent.linear_num_key_heads
    assert config.delta.num_v_heads == silent.linear_num_value_heads
    assert config.delta.key_dim == silent.linear_key_head_dim
    assert config.delta.value_dim == silent.linear_value_head_dim
    assert len(config.attention_specs) == 2
    assert len(config.recurrent_specs) == 12


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"layer_types": ["sliding_attention"] * 8}, "layer_types has 'sliding_attention'"),
        ({"attn_output_gate": False}, "attn_output_gate is false"),
        ({"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"attention_chunk_size": 2}, "attention_chunk_size"),
    ],
)
def test_refuses_what_it_does_not_understand(fields, message):
    with pytest.raises(UnsupportedModelError, match=message):
        Qwen35Config.from_hf(RAW | fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"linear_num_value_heads": 24}, "must be a multiple of linear_num_key_heads, 16"),
        ({"linear_value_head_dim": 24}, "a multiple of 16"),
        ({"layer_types": ["full_attention"]}, "a list of num_hidden_layers"),
    ],
)
def test_refuses_sizes_that_can_not_be(fields, message):
    with pytest.raises(CheckpointError, match=message):
        Qwen35Config.from_hf(RAW | fields)


def test_ranks_share_key_heads():
    config = Qwen35Config.from_hf(RAW | {"num_attention_heads": 64, "num_key_value_heads": 64})
    assert config.why_not_split(4) is None
    assert "16 key heads of linear attention" in str(config.why_not_split(32))
    share = config.share_of(1, 4)
    assert (share.delta.num_k_heads, share.delta.num_v_heads) == (4, 8)
