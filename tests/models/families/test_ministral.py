"""Ministral and Ministral 3 against transformers: windows by layer, queries that grow."""

import pytest
import torch
from tests.models.family_shapes import FAMILIES, GROWING_YARN, SMALL_IDS
from transformers import Ministral3Config as HFMinistral3Config
from transformers import MinistralConfig as HFMinistralConfig

from quire.errors import CheckpointError, UnsupportedModelError
from quire.models.families.ministral import Ministral3Config, MinistralConfig

RAW = {
    "architectures": ["MinistralForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "max_position_embeddings": 64,
}
WITHOUT_NAME = {name: RAW[name] for name in RAW if name != "architectures"}

SHAPES = {
    "all": FAMILIES["ministral"][1],
    "all slide": {"sliding_window": 5, "head_dim": 16},
    "one layer, tied": {"num_hidden_layers": 1, "head_dim": 32, "tie_word_embeddings": True},
}
SHAPES_3 = {
    "all": FAMILIES["ministral3"][1],
    "no window": {"rope_parameters": GROWING_YARN, "head_dim": 16},
    "grows slowly": {
        "rope_parameters": GROWING_YARN | {"original_max_position_embeddings": 47},
        "num_hidden_layers": 1,
    },
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_logits_equal_transformers(shape, save_checkpoint, assert_same_logits):
    folder, reference = save_checkpoint(HFMinistralConfig, **shape)
    model = assert_same_logits(folder, reference)
    windows = [
        reference.config.sliding_window if kind == "sliding_attention" else None
        for kind in reference.config.layer_types
    ]
    assert [spec.window for spec in model.attention_specs] == windows


@pytest.mark.parametrize("shape", SHAPES_3.values(), ids=SHAPES_3.keys())
def test_logits_of_ministral_3_equal_transformers(shape, save_checkpoint, assert_same_logits):
    folder, reference = save_checkpoint(HFMinistral3Config, **(SMALL_IDS | shape))
    assert_same_logits(folder, reference)


def test_queries_grow_from_the_length_on(save_checkpoint, load, run, edit_config):
    folder, _ = save_checkpoint(HFMinistral3Config, **FAMILIES["ministral3"][1])
    token_ids = torch.arange(20)
    growing = run(load(folder), token_ids, [20])
    edit_config(folder, rope_parameters=GROWING_YARN | {"llama_4_scaling_beta": 1e-9})
    constant = run(load(folder), token_ids, [20])
    torch.testing.assert_close(growing[:7], constant[:7])
    assert (growing[7:] - constant[7:]).abs().amax(-1).min() > 1e-3


def test_no_factors_are_kept_where_all_are_1(save_checkpoint, load):
    folder, _ = save_checkpoint(HFMinistral3Config, **FAMILIES["ministral3"][1])
    assert load(folder, max_model_len=7).model.growth is None
    assert load(folder, max_model_len=8).model.growth.table.shape == (8, 1)


def test_silent_fields_have_transformers_values():
    config, silent = MinistralConfig.from_hf(RAW), HFMinistralConfig(**WITHOUT_NAME)
    assert config.windows == (silent.sliding_window,) * 2 == (4096, 4096)
    assert config.num_kv_heads == silent.num_key_value_heads == 8
    config, silent = Ministral3Config.from_hf(RAW), HFMinistral3Config(**WITHOUT_NAME)
    assert config.windows == (silent.sliding_window,) * 2 == (None, None)
    assert config.num_kv_heads == silent.num_key_value_heads == 8
    assert config.head_dim == silent.head_dim == 128
    assert config.rms_norm_eps == silent.rms_norm_eps == 1e-5
    rope = silent.rope_parameters
    assert config.query_growth.beta == rope["llama_4_scaling_beta"]
    assert config.query_growth.length == rope["original_max_position_embeddings"]
    names = ("factor", "rope_theta", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
    assert [getattr(config.rope, name) for name in names] == [rope[name] for name in names]


@pytest.mark.parametrize("name", ["llama_4_scaling_beta", "original_max_position_embeddings"])
def test_growth_must_be_said(name):
    rope = {key: value for key, value in GROWING_YARN.items() if key != name}
    with pytest.raises(CheckpointError, match="by which its queries grow"):
        Ministral3Config.from_hf(RAW | {"rope_parameters": rope})


@pytest.mark.parametrize("kind", [MinistralConfig, Ministral3Config])
@pytest.mark.parametrize("field", ["attention_bias", "mlp_bias"])
def test_fields_of_other_models_are_refused(kind, field):
    with pytest.raises(UnsupportedModelError, match=f"the field {field} is True"):
        kind.from_hf(RAW | {field: True})
