"""Granite against transformers: its four multipliers, one at a time and all together."""

import pytest
from transformers import GraniteConfig as HFGraniteConfig

from quire.errors import CheckpointError, UnsupportedModelError
from quire.models.families.granite import GraniteConfig

RAW = {
    "architectures": ["GraniteForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
MULTIPLIERS = {
    "embedding_multiplier": 12.0,
    "residual_multiplier": 0.22,
    "attention_multiplier": 0.1,
    "logits_scaling": 0.25,
}

SHAPES = {
    "plain": {},
    **{name: {name: value} for name, value in MULTIPLIERS.items()},
    "all": MULTIPLIERS,
    "all, tied, with biases": MULTIPLIERS
    | {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_logits_equal_transformers(shape, save_checkpoint, assert_same_logits):
    folder, reference = save_checkpoint(HFGraniteConfig, **shape)
    assert_same_logits(folder, reference)


def test_silent_fields_have_transformers_values():
    config = GraniteConfig.from_hf(RAW)
    silent = HFGraniteConfig(**{name: RAW[name] for name in RAW if name != "architectures"})
    assert config.embedding_scale == silent.embedding_multiplier
    assert config.residual_scale == silent.residual_multiplier
    assert config.attention_specs[0].scale == silent.attention_multiplier
    assert config.logits_scale == 1 / silent.logits_scaling


@pytest.mark.parametrize("name", MULTIPLIERS)
@pytest.mark.parametrize("value", [0, -1.0, "2", float("inf")])
def test_an_impossible_multiplier_is_refused(name, value):
    with pytest.raises(CheckpointError, match=f"{name} is"):
        GraniteConfig.from_hf(RAW | {name: value})


def test_fields_of_other_models_are_refused():
    with pytest.raises(UnsupportedModelError, match="the field num_local_experts is 8"):
        GraniteConfig.from_hf(RAW | {"num_local_experts": 8})
