"""OLMo 3 against transformers: windows, and a rope type that only some layers have."""

import pytest
from tests.models.family_shapes import FAMILIES
from transformers import Olmo3Config as HFOlmo3Config

from quire.errors import CheckpointError, UnsupportedModelError
from quire.layers.rotary import DefaultRope, YarnRope
from quire.models.families.olmo3 import Olmo3Config

RAW = {
    "architectures": ["Olmo3ForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}

SHAPES = {
    "all": FAMILIES["olmo3"][1],
    "kinds named": {
        "sliding_window": 3,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    },
    "stretched": {
        "sliding_window": 7,
        "num_hidden_layers": 4,
        "attention_bias": True,
        "rope_parameters": {
            "full_attention": YARN | {"rope_theta": 500.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
        },
    },
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_logits_equal_transformers(shape, save_checkpoint, assert_same_logits):
    folder, reference = save_checkpoint(HFOlmo3Config, **shape)
    model = assert_same_logits(folder, reference)
    windows = [
        shape["sliding_window"] if kind == "sliding_attention" else None
        for kind in reference.config.layer_types
    ]
    assert [spec.window for spec in model.attention_specs] == windows


@pytest.mark.parametrize("fields", [{}, {"rope_theta": 100.0, "rope_scaling": YARN}])
def test_silent_fields_have_transformers_values(fields):
    config = Olmo3Config.from_hf(RAW | fields)
    silent = HFOlmo3Config(
        **{name: RAW[name] for name in RAW if name != "architectures"},
        **{
            name: dict(value) if name == "rope_scaling" else value for name, value in fields.items()
        },
    )
    assert config.rms_norm_eps == silent.rms_norm_eps == 1e-5
    assert config.windows == (4096, 4096, 4096, None, 4096)
    kinds = ["full_attention", "sliding_attention"]
    assert config.layer_ropes == tuple(map(kinds.index, silent.layer_types))
    theirs = [silent.rope_parameters[kind] for kind in kinds]
    assert [each.rope.rope_theta for each in config.ropes] == [
        each["rope_theta"] for each in theirs
    ]
    assert isinstance(config.rope, YarnRope if fields else DefaultRope)
    assert [each.rope.type_name for each in config.ropes] == [each["rope_type"] for each in theirs]


def test_windows_without_a_size_are_refused():
    with pytest.raises(CheckpointError, match="but no sliding_window"):
        Olmo3Config.from_hf(RAW | {"sliding_window": None})


@pytest.mark.parametrize("rope", [{"chunked_attention": {"rope_type": "default"}}])
def test_rotations_of_other_kinds_are_refused(rope):
    with pytest.raises(UnsupportedModelError, match="chunked_attention"):
        Olmo3Config.from_hf(RAW | {"rope_parameters": {"full_attention": {}, **rope}})


@pytest.mark.parametrize("field", ["clip_qkv", "mlp_bias"])
def test_fields_of_other_models_are_refused(field):
    with pytest.raises(UnsupportedModelError, match=f"the field {field} is 7"):
        Olmo3Config.from_hf(RAW | {field: 7})
