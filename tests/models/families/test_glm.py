"""GLM-4 against transformers: heads that rotate in part and in pairs, with norms on both sides."""

import pytest
import torch
from tests.models.family_shapes import FAMILIES, SMALL_IDS
from transformers import Glm4Config as HFGlm4Config
from transformers import GlmConfig as HFGlmConfig

from quire.errors import UnsupportedModelError
from quire.models.families.glm import GlmConfig

KINDS = {"GlmForCausalLM": HFGlmConfig, "Glm4ForCausalLM": HFGlm4Config}
RAW = {
    "architectures": ["GlmForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}


def _rotating(factor):
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": factor}
    return {"rope_parameters": rope}


SHAPES = {
    "all": FAMILIES["glm"][1],
    "no biases": {"attention_bias": False},
    "a quarter rotates": {"head_dim": 40, **_rotating(0.25)},
    "all rotates": _rotating(1.0),
    "tied": {"tie_word_embeddings": True, "head_dim": 32},
    "multi-query": {"num_key_value_heads": 1, "head_dim": 16},
}


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_logits_equal_transformers(shape, kind, save_checkpoint, assert_same_logits):
    folder, reference = save_checkpoint(kind, **(SMALL_IDS | shape))
    assert_same_logits(folder, reference)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS.keys())
def test_rounds_as_transformers(kind, save_checkpoint, load, run):
    folder, reference = save_checkpoint(kind, **FAMILIES["glm"][1])
    token_ids = torch.arange(100, 140)
    with torch.inference_mode():
        expected = reference.bfloat16()(token_ids[None]).logits[0].float()
    logits = run(load(folder, dtype=torch.bfloat16), token_ids, [40])
    assert (logits - expected).abs().mean() < 0.02 * expected.abs().mean()


@pytest.mark.parametrize("name", KINDS)
def test_silent_fields_have_transformers_values(name):
    config = GlmConfig.from_hf(RAW | {"architectures": [name]})
    silent = KINDS[name](**{name: RAW[name] for name in RAW if name != "architectures"})
    assert config.head_dim == silent.head_dim == 128
    assert config.num_kv_heads == silent.num_key_value_heads == 2
    assert config.rms_norm_eps == silent.rms_norm_eps
    assert config.qkv_bias is silent.attention_bias is True
    assert config.rotary_dim == 128 * silent.rope_parameters["partial_rotary_factor"] == 64


@pytest.mark.parametrize("field", ["n_routed_experts", "sliding_window", "attention_chunk_size"])
def test_fields_of_other_models_are_refused(field):
    with pytest.raises(UnsupportedModelError, match=f"the field {field} is 7"):
        GlmConfig.from_hf(RAW | {field: 7})
