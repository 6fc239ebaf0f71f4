"""SmolLM3 against transformers: layers whose heads are not rotated, with and without a window."""

import pytest
from tests.models.family_shapes import FAMILIES, SMALL_IDS
from transformers import SmolLM3Config as HFSmolLM3Config

from quire.errors import CheckpointError, UnsupportedModelError
from quire.models.families.smollm3 import SmolLM3Config

RAW = {
    "architectures": ["SmolLM3ForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
SLIDES = {"use_sliding_window": True, "sliding_window": 6}

SHAPES = {
    "all": FAMILIES["smollm3"][1],
    "each fourth": {"num_hidden_layers": 5},
    "each second": {"no_rope_layer_interval": 2},
    "none rotates": {"no_rope_layers": [0, 0, 0]},
    "all rotate": {"no_rope_layers": [1, 1, 1, 0]},
    "biases, untied": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False},
    "kinds named": SLIDES
    | {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_logits_equal_transformers(shape, save_checkpoint, assert_same_logits):
    folder, reference = save_checkpoint(HFSmolLM3Config, **(SMALL_IDS | shape))
    model = assert_same_logits(folder, reference)
    kinds, window = reference.config.layer_types, reference.config.sliding_window
    windows = [window if kind == "sliding_attention" else None for kind in kinds]
    assert [spec.window for spec in model.attention_specs] == windows


@pytest.mark.parametrize("fields", [{}, SLIDES, {"no_rope_layer_interval": 3}])
def test_silent_fields_have_transformers_values(fields):
    config = SmolLM3Config.from_hf(RAW | fields)
    silent = HFSmolLM3Config(
        **{name: RAW[name] for name in RAW if name != "architectures"}, **fields, **SMALL_IDS
    )
    assert config.num_kv_heads == silent.num_key_value_heads == 4
    assert config.tie_word_embeddings is silent.tie_word_embeddings is True
    assert config.rope.rope_theta == silent.rope_parameters["rope_theta"] == 2e6
    assert config.layer_ropes == tuple(0 if each else None for each in silent.no_rope_layers)
    assert [window is not None for window in config.windows] == [
        kind == "sliding_attention" for kind in silent.layer_types
    ]


@pytest.mark.parametrize("value", [[1, 0], "1111", [1, 0, 2, 1, 1], [1, 0, None, 1, 1]])
def test_an_impossible_list_is_refused(value):
    with pytest.raises(CheckpointError, match="no_rope_layers is"):
        SmolLM3Config.from_hf(RAW | {"no_rope_layers": value})


def test_fields_of_other_models_are_refused():
    with pytest.raises(UnsupportedModelError, match="the field qk_norm is True"):
        SmolLM3Config.from_hf(RAW | {"qk_norm": True})
