"""LFM2 against transformers: kinds of layers, biases, taps, and the size of the MLP."""

import pytest
import transformers
from tests.models.family_shapes import FAMILIES, SMALL

from quire.errors import CheckpointError, UnsupportedModelError
from quire.models.families.hybrids.lfm2 import Lfm2Config

SHAPES = {
    "convolutions and attention, biases": {},
    "no biases, four taps, an untied head": {
        "conv_bias": False,
        "conv_L_cache": 4,
        "tie_word_embeddings": False,
    },
    "the MLP's own size": {"block_auto_adjust_ff_dim": False},
    "another rotation": {"rope_parameters": {"rope_type": "default", "rope_theta": 300.0}},
}


@pytest.mark.parametrize("changes", SHAPES.values(), ids=SHAPES.keys())
def test_logits_equal_transformers(changes, save_checkpoint, assert_same_logits):
    class_name, fields = FAMILIES["lfm2"]
    folder, reference = save_checkpoint(getattr(transformers, class_name), **(fields | changes))
    assert_same_logits(folder, reference)


RAW = {
    "architectures": ["Lfm2ForCausalLM"],
    **{name: SMALL[name] for name in SMALL if name not in ("intermediate_size",)},
    "num_hidden_layers": 4,
}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"full_attn_idxs": [1, 3], "tie_embedding": False, "block_ff_dim": 1000},
        {"block_ffn_dim_multiplier": 1.3, "intermediate_size": 777, "block_multiple_of": 8},
    ],
)
def test_fields_have_transformers_values(fields):
    """Fields that are silent, and those of old configs."""
    config = Lfm2Config.from_hf(RAW | fields)
    given = {name: value for name, value in (RAW | fields).items() if name != "architectures"}
    theirs = transformers.Lfm2Config(**given, attn_implementation="eager")
    mlp = transformers.models.lfm2.modeling_lfm2.Lfm2MLP(theirs)
    assert list(config.layer_types) == theirs.layer_types
    assert config.intermediate_size == mlp.w1.out_features
    assert config.tie_word_embeddings == theirs.tie_word_embeddings
    assert config.num_kv_heads == theirs.num_key_value_heads
    assert config.conv_bias == theirs.conv_bias
    assert config.conv.width == theirs.conv_L_cache
    assert config.rms_norm_eps == theirs.norm_eps
    assert config.rope.rope_theta == theirs.rope_parameters["rope_theta"]


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"rms_norm_eps": 1e-6}, UnsupportedModelError, "rms_norm_eps"),
        ({"full_attn_idxs": 3}, CheckpointError, "a list of layers"),
        ({"layer_types": ["mamba"] * 4}, UnsupportedModelError, "understood are conv"),
        ({"hidden_act": "gelu"}, UnsupportedModelError, "hidden_act"),
    ],
)
def test_refuses(fields, error, message):
    with pytest.raises(error, match=message):
        Lfm2Config.from_hf(RAW | fields)


def test_ranks_share_channels():
    config = Lfm2Config.from_hf(RAW)
    assert config.why_not_split(2) is None
    assert config.share_of(0, 2).conv.num_channels == 32
    odd = Lfm2Config.from_hf(RAW | {"hidden_size": 60, "head_dim": 16, "num_attention_heads": 8})
    assert "60 channels" in str(odd.why_not_split(8))
