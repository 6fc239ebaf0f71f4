"""Phi-3 against transformers: fused tensors in the files, LongRoPE, heads that rotate in part."""

import pytest
from tests.models.family_shapes import FAMILIES, PARTIAL_LONGROPE, SMALL_IDS
from transformers import Phi3Config as HFPhi3Config

from quire.errors import CheckpointError, UnsupportedModelError
from quire.layers.rotary import LongRope
from quire.models.families.phi3 import Phi3Config
from quire.models.registry import load_config

RAW = {
    "architectures": ["Phi3ForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}
LONGROPE = PARTIAL_LONGROPE | {"partial_rotary_factor": 1.0} | {
    name: PARTIAL_LONGROPE[name] + [20.0] * 4 for name in ("short_factor", "long_factor")
}  # fmt: skip

SHAPES = {
    "plain": {},
    "all": FAMILIES["phi3"][1],
    "multi-head": {"num_key_value_heads": None},
    "7 query heads per KV head": {
        "num_attention_heads": 7,
        "num_key_value_heads": 1,
        "hidden_size": 56,
    },
    "window": {"sliding_window": 5},
    "tied": {"tie_word_embeddings": True},
    "long": {
        "num_attention_heads": 2,
        "original_max_position_embeddings": 16,
        "rope_parameters": LONGROPE,
    },
    "short": {
        "num_attention_heads": 2,
        "original_max_position_embeddings": 50,
        "rope_parameters": LONGROPE,
    },
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_logits_equal_transformers(shape, save_checkpoint, assert_same_logits):
    folder, reference = save_checkpoint(HFPhi3Config, **(SMALL_IDS | shape))
    model = assert_same_logits(folder, reference)
    assert {spec.window for spec in model.attention_specs} == {shape.get("sliding_window")}


@pytest.mark.parametrize("name", ["su", "yarn", "longrope"])
def test_old_names_of_the_rope_type(name):
    rope = {"type": name, "short_factor": [1.0] * 16, "long_factor": [2.0] * 16}
    config = Phi3Config.from_hf(RAW | {"rope_scaling": rope, "rope_theta": 1e4})
    assert isinstance(config.rope, LongRope)
    assert config.rope.original_max_position_embeddings == 4096  # as transformers has it


def test_silent_fields_have_transformers_values():
    config = Phi3Config.from_hf(RAW)
    silent = HFPhi3Config(**{name: RAW[name] for name in RAW if name != "architectures"})
    assert config.rms_norm_eps == silent.rms_norm_eps == 1e-5
    assert config.num_kv_heads == silent.num_key_value_heads == 2
    assert config.windows == (silent.sliding_window,) * 2 == (None, None)
    assert config.tie_word_embeddings is silent.tie_word_embeddings is False


def test_phi_4_minis_own_fields_are_understood():
    config = Phi3Config.from_hf(
        RAW
        | {"auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"}, "embd_pdrop": 0.0}
        | {"attention_bias": False, "lm_head_bias": False, "mlp_bias": False, "resid_pdrop": 0.0}
        | {"full_attn_mod": 1, "interpolate_factor": 1, "partial_rotary_factor": 0.75}
    )
    assert config.rotary_dim == 24


@pytest.mark.parametrize("name", ["attention_bias", "lm_head_bias", "mlp_bias"])
def test_biases_are_refused(name):
    with pytest.raises(UnsupportedModelError, match=f"{name} is True"):
        Phi3Config.from_hf(RAW | {name: True})


def test_fields_of_other_models_are_refused():
    with pytest.raises(UnsupportedModelError, match="the field attention_chunk_size is 64"):
        Phi3Config.from_hf(RAW | {"attention_chunk_size": 64})


def test_fused_tensors_of_another_size_are_refused_by_name(save_checkpoint, load, edit_config):
    folder, _ = save_checkpoint(HFPhi3Config, **SMALL_IDS)
    edit_config(folder, num_key_value_heads=4)
    assert load_config(folder).num_kv_heads == 4
    with pytest.raises(CheckpointError, match=r"qkv_proj\.weight' has 128 outputs.*64 \+ 64 \+ 64"):
        load(folder)
