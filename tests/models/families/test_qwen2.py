"""Qwen2 against transformers: biases on q, k and v, and windows on some layers."""

import pytest
from transformers import Qwen2Config as HFQwen2Config

from quire.errors import CheckpointError, UnsupportedModelError
from quire.models.families.qwen2 import Qwen2Config

RAW = {
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
WINDOW_ON = {"use_sliding_window": True, "sliding_window": 6}
LAYER_TYPES = ["sliding_attention", "full_attention", "full_attention", "sliding_attention"]

SHAPES = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "7 query heads per KV head": {
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "hidden_size": 112,
    },
    "multi-query": {"num_key_value_heads": 1},
    "windows from layer 1 on": WINDOW_ON | {"max_window_layers": 1},
    "windows by layer": WINDOW_ON | {"layer_types": LAYER_TYPES[:3]},
    "window switched off": {"sliding_window": 6, "max_window_layers": 0},
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_logits_equal_transformers(shape, save_checkpoint, assert_same_logits):
    folder, reference = save_checkpoint(HFQwen2Config, **shape)
    model = assert_same_logits(folder, reference)
    kinds = reference.config.layer_types
    assert [spec.window is not None for spec in model.attention_specs] == [
        kind == "sliding_attention" for kind in kinds
    ]


def test_only_q_k_and_v_have_a_bias():
    config = Qwen2Config.from_hf(RAW)
    assert config.qkv_bias
    assert not (config.output_bias or config.mlp_bias or config.qk_norm)


@pytest.mark.parametrize(
    ("fields", "windows"),
    [
        ({}, (None,) * 4),
        ({"sliding_window": 6}, (None,) * 4),
        ({"use_sliding_window": True, "sliding_window": None}, (None,) * 4),
        ({"use_sliding_window": True, "max_window_layers": 3}, (None, None, None, 4096)),
        (WINDOW_ON | {"max_window_layers": 0}, (6,) * 4),
        (WINDOW_ON | {"max_window_layers": 2}, (None, None, 6, 6)),
        (WINDOW_ON | {"max_window_layers": 28}, (None,) * 4),
        (WINDOW_ON, (None,) * 4),
        (WINDOW_ON | {"max_window_layers": 0, "layer_types": LAYER_TYPES}, (6, None, None, 6)),
    ],
)
def test_window_layers(fields, windows):
    assert Qwen2Config.from_hf(RAW | fields).windows == windows


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"layer_types": LAYER_TYPES[:3]}, CheckpointError, "must be a list of num_hidden_layers"),
        ({"layer_types": "full_attention"}, CheckpointError, "must be a list"),
        ({"layer_types": ["chunked_attention"] * 4}, UnsupportedModelError, "chunked_attention"),
        ({"layer_types": LAYER_TYPES}, UnsupportedModelError, "with use_sliding_window"),
        ({"use_sliding_window": 1}, CheckpointError, "must be true or false"),
        ({"max_window_layers": -1}, CheckpointError, "must be an integer from 0 to 65536"),
        ({"use_mrope": True}, UnsupportedModelError, "use_mrope is True"),
        ({"attention_bias": True}, UnsupportedModelError, "the field attention_bias"),
    ],
)
def test_unknown_config_values_are_refused(fields, error, message):
    with pytest.raises(error, match=message):
        Qwen2Config.from_hf(RAW | fields)
