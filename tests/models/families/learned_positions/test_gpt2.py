"""GPT-2 against transformers: learned positions, and linears that lie transposed in the files."""

import pytest
from safetensors.torch import load_file, save_file
from tests.models.family_shapes import FAMILIES
from transformers import GPT2Config as HFGPT2Config

from quire.errors import CheckpointError, UnsupportedModelError
from quire.models.families.learned_positions.gpt2 import GPT2Config
from quire.models.registry import load_config

RAW = {
    "architectures": ["GPT2LMHeadModel"],
    "vocab_size": 100,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
}
BASE = FAMILIES["gpt2"][1]

SHAPES = {
    "all": {},
    "inner size of its own": {"n_inner": None},
    "untied, relu": {"tie_word_embeddings": False, "activation_function": "relu"},
    "unscaled": {"scale_attn_weights": False, "n_layer": 1},
    "large epsilon, gelu": {"layer_norm_epsilon": 0.01, "activation_function": "gelu"},
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_logits_equal_transformers(shape, save_checkpoint, assert_same_logits):
    folder, reference = save_checkpoint(HFGPT2Config, base=BASE, **shape)
    assert_same_logits(folder, reference)


def test_old_files_without_prefix_and_with_masks(save_checkpoint, assert_same_logits):
    folder, reference = save_checkpoint(HFGPT2Config, base=BASE)
    path = folder / "model.safetensors"
    tensors = {
        name.removeprefix("transformer."): tensor for name, tensor in load_file(path).items()
    }
    for layer in range(3):
        tensors[f"h.{layer}.attn.bias"] = tensors["ln_f.weight"].clone()
    save_file(tensors, path)
    assert_same_logits(folder, reference)


def test_positions_bound_the_context(save_checkpoint):
    config = load_config(save_checkpoint(HFGPT2Config, base=BASE)[0])
    assert config.max_supported_positions == 64
    assert config.position_origin == "each of which has a learned vector"
    assert config.bytes_per_position == 0
    assert config.position_key(16) == config.position_key(64)


def test_silent_fields_have_transformers_values():
    config = GPT2Config.from_hf(RAW)
    silent = HFGPT2Config(**{name: RAW[name] for name in RAW if name != "architectures"})
    assert config.intermediate_size == 4 * silent.hidden_size == 256
    assert config.rms_norm_eps == silent.layer_norm_epsilon
    assert config.tie_word_embeddings is silent.tie_word_embeddings is True
    assert config.activation.value == "gelu_tanh" and silent.activation_function == "gelu_new"


def test_names_of_transformers_are_known_as_well():
    names = {"n_embd": "hidden_size", "n_layer": "num_hidden_layers"}
    config = GPT2Config.from_hf({names.get(name, name): value for name, value in RAW.items()})
    assert config == GPT2Config.from_hf(RAW)


@pytest.mark.parametrize(
    "field", ["scale_attn_by_inverse_layer_idx", "add_cross_attention", "rotary_dim", "hidden_act"]
)
def test_fields_of_other_models_are_refused(field):
    with pytest.raises(UnsupportedModelError, match=f"{field} is True"):
        GPT2Config.from_hf(RAW | {field: True})


def test_another_size_is_refused_by_name(save_checkpoint, load, edit_config):
    folder, _ = save_checkpoint(HFGPT2Config, base=BASE)
    edit_config(folder, n_embd=72)
    with pytest.raises(CheckpointError, match=r"qkv_proj\.bias' has 144 outputs"):
        load(folder)
