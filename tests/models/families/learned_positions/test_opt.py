"""OPT against transformers: learned positions whose table begins with two that none has."""

import pytest
from safetensors.torch import load_file, save_file
from tests.models.family_shapes import FAMILIES
from transformers import OPTConfig as HFOPTConfig

from quire.errors import UnsupportedModelError
from quire.models.families.learned_positions.opt import OPTConfig

RAW = {
    "architectures": ["OPTForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "ffn_dim": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
BASE = FAMILIES["opt"][1]

SHAPES = {
    "all": {},
    "untied": {"tie_word_embeddings": False},
    "Galactica's": {
        "enable_bias": False,
        "layer_norm_elementwise_affine": False,
        "activation_function": "gelu",
    },
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_logits_equal_transformers(shape, save_checkpoint, assert_same_logits):
    folder, reference = save_checkpoint(HFOPTConfig, base=BASE, **shape)
    model = assert_same_logits(folder, reference)
    assert model.model.embed_positions.weight.shape == (64, 48)


def test_old_files_without_prefix(save_checkpoint, assert_same_logits):
    folder, reference = save_checkpoint(HFOPTConfig, base=BASE)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    save_file({name.removeprefix("model."): tensors[name] for name in tensors}, path)
    assert_same_logits(folder, reference)


def test_silent_fields_have_transformers_values():
    config = OPTConfig.from_hf(RAW)
    silent = HFOPTConfig(**{name: RAW[name] for name in RAW if name != "architectures"})
    assert config.activation.value == silent.activation_function == "relu"
    assert config.qkv_bias is config.output_bias is config.mlp_bias is silent.enable_bias is True
    assert config.tie_word_embeddings is silent.tie_word_embeddings is True
    assert (config.norm == "layer") is silent.layer_norm_elementwise_affine is True


@pytest.mark.parametrize(
    "fields",
    [
        {"do_layer_norm_before": False},
        {"_remove_final_layer_norm": True},
        {"word_embed_proj_dim": 32},
        {"rms_norm_eps": 1e-5},
        {"intermediate_size": 96},
        {"rope_theta": 1e4},
    ],
)
def test_other_shapes_are_refused_by_name(fields):
    (name,) = fields
    with pytest.raises(UnsupportedModelError, match=f"{name} is {fields[name]}"):
        OPTConfig.from_hf(RAW | fields)
