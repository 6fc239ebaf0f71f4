"""What all decoder configs read alike."""

import pytest
import torch

from quire.errors import CheckpointError, UnsupportedModelError
from quire.layers.rotary import DefaultRope, LinearRope
from quire.models.families.llama import LlamaConfig

RAW = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 96,
    "intermediate_size": 50,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "max_position_embeddings": 64,
}


def _read(**fields) -> LlamaConfig:
    return LlamaConfig.from_hf(RAW | fields)


def test_reads_the_shape():
    config = _read(rms_norm_eps=1e-5, tie_word_embeddings=True)
    assert config.architecture == "LlamaForCausalLM"
    assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (100, 96, 50)
    assert (config.num_layers, config.num_heads, config.num_kv_heads) == (2, 6, 3)
    assert (config.head_dim, config.max_position_embeddings) == (16, 64)
    assert config.rms_norm_eps == 1e-5
    assert config.tie_word_embeddings


def test_the_rope_type_says_how_far_the_trained_length_can_be_stretched():
    assert _read().max_supported_positions == 64
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    assert _read(rope_scaling=yarn).max_supported_positions == 128
    assert _read(rope_scaling=yarn | {"factor": 1.5}).max_supported_positions == 64


def test_gives_an_attention_spec_for_each_layer():
    specs = _read().attention_specs
    assert len(specs) == 2
    assert (specs[0].num_heads, specs[0].num_kv_heads, specs[0].head_dim) == (6, 3, 16)
    assert specs[0].scale == 0.25
    assert specs[0].window is None and specs[0].soft_cap is None
    assert specs[0].causal and not specs[0].has_sinks


def test_head_size_and_kv_heads_have_defaults():
    config = _read(head_dim=None, num_key_value_heads=None)
    assert (config.head_dim, config.num_kv_heads) == (16, 6)
    assert _read(head_dim=80).head_dim == 80


@pytest.mark.parametrize(
    "field",
    [
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "max_position_embeddings",
    ],
)
def test_a_shape_is_never_guessed(field):
    raw = {name: RAW[name] for name in RAW if name != field}
    with pytest.raises(CheckpointError, match=f"config.json has no {field}"):
        LlamaConfig.from_hf(raw)


@pytest.mark.parametrize("names", [None, [], "LlamaForCausalLM", ["a", "b"], [3]])
def test_architectures_must_be_one_name(names):
    with pytest.raises(CheckpointError, match=r"architectures is .* a list of one name"):
        _read(architectures=names)


def test_heads_that_do_not_divide_are_refused():
    with pytest.raises(CheckpointError, match=r"num_attention_heads is 6, .* multiple of .* 4"):
        _read(num_key_value_heads=4)


def test_an_odd_head_size_is_refused():
    with pytest.raises(CheckpointError, match="head_dim is 7, but must be a multiple of 2 from 2"):
        _read(head_dim=7)
    with pytest.raises(
        CheckpointError, match="hidden_size 96 over num_attention_heads 32 is 3, but"
    ):
        _read(num_attention_heads=32, num_key_value_heads=32)


@pytest.mark.parametrize("act", ["gelu", "relu", "gelu_pytorch_tanh"])
def test_other_activations_are_refused(act):
    with pytest.raises(UnsupportedModelError, match=f"hidden_act is '{act}', but only silu"):
        _read(hidden_act=act)


@pytest.mark.parametrize(
    ("fields", "dtype"),
    [
        ({}, None),
        ({"torch_dtype": None}, None),
        ({"torch_dtype": "auto"}, None),
        ({"torch_dtype": "bfloat16"}, torch.bfloat16),
        ({"dtype": "float16"}, torch.float16),
        ({"dtype": "float32", "torch_dtype": "bfloat16"}, torch.float32),
        ({"torch_dtype": "torch.bfloat16"}, torch.bfloat16),
        ({"torch_dtype": "half"}, torch.float16),
        ({"dtype": "float64"}, torch.float32),
        ({"dtype": {"": "bfloat16", "vision_config": "float32"}}, torch.bfloat16),
    ],
)
def test_reads_the_checkpoints_dtype(fields, dtype):
    assert _read(**fields).dtype == dtype


def test_an_unknown_dtype_is_refused_with_the_list():
    with pytest.raises(UnsupportedModelError, match="dtype is 'int8', but only float32, float16"):
        _read(torch_dtype="int8")


def test_reads_the_rope():
    assert _read().rope == DefaultRope(10000.0)
    assert _read(rope_theta=5e5, rope_scaling={"type": "linear", "factor": 2}).rope == LinearRope(
        5e5, 2.0
    )


def test_is_frozen():
    with pytest.raises(AttributeError):
        _read().vocab_size = 3


@pytest.mark.parametrize(
    "fields",
    [
        {"hidden_act": "swish"},
        {"is_decoder": True},
        {"use_sliding_window": False},
        {"name": "mine"},
    ],
)
def test_equivalent_config_fields_are_accepted(fields):
    assert _read(**fields) == _read()
