"""Qwen3-Next against transformers."""

import pytest
from tests.models.families.hybrids.test_qwen3_5 import EXPERTS, RAW, SIZES
from transformers import Qwen3NextConfig as HFQwen3NextConfig

from quire.models.families.hybrids.qwen3_next import Qwen3NextConfig

# Errors grow with the depth, of both forms of the delta rule.
THREE = {"num_hidden_layers": 3, "layer_types": SIZES["layer_types"][:3]}
SHAPES = {
    "experts": {},
    "some layers are dense": {"mlp_only_layers": [1], "decoder_sparse_step": 2},
    "weights as they are": {"norm_topk_prob": False, "tie_word_embeddings": True},
    "three value heads to a key head": {"linear_num_value_heads": 6},
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_logits_equal_transformers(shape, save_checkpoint, assert_same_logits):
    folder, reference = save_checkpoint(HFQwen3NextConfig, **(SIZES | EXPERTS | THREE | shape))
    assert_same_logits(folder, reference)


def test_silent_fields_have_transformers_values():
    raw = {name: RAW[name] for name in RAW if name != "num_key_value_heads"}
    config = Qwen3NextConfig.from_hf(raw)
    silent = HFQwen3NextConfig(**{name: raw[name] for name in raw if name != "architectures"})
    assert config.num_kv_heads == silent.num_key_value_heads
    assert list(config.layer_types) == silent.layer_types
    assert config.mixtures is not None
    (mixture,) = set(config.mixtures)
    assert mixture.router.num_experts == silent.num_experts
    assert mixture.router.top_k == silent.num_experts_per_tok
    assert mixture.router.renormalizes == silent.norm_topk_prob
    assert mixture.intermediate_size == silent.moe_intermediate_size
    assert mixture.shared_size == silent.shared_expert_intermediate_size
