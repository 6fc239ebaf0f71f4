"""Mistral against transformers, with and without its window."""

import pytest
import torch
from transformers import MistralConfig as HFMistralConfig

from quire.errors import CheckpointError, UnsupportedModelError
from quire.models.families.mistral import MistralConfig
from quire.models.registry import load_config

RAW = {
    "architectures": ["MistralForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "max_position_embeddings": 64,
}


@pytest.mark.parametrize("window", [1, 2, 7, 16, 47, 48, None])
def test_logits_equal_transformers(window, save_checkpoint, assert_same_logits):
    folder, reference = save_checkpoint(HFMistralConfig, sliding_window=window)
    model = assert_same_logits(folder, reference)
    assert [spec.window for spec in model.attention_specs] == [window] * 3


def test_the_window_changes_the_logits_from_its_first_forgotten_key_on(
    save_checkpoint, load, run, edit_config
):
    folder, _ = save_checkpoint(HFMistralConfig, sliding_window=5)
    token_ids = torch.arange(20)
    windowed = run(load(folder), token_ids, [20])
    edit_config(folder, sliding_window=None)
    full = run(load(folder), token_ids, [20])
    # Positions 0 to 4 see at most five keys, themselves included; position 5 has lost the first.
    assert torch.equal(windowed[:5], full[:5])
    assert (windowed[5] - full[5]).abs().max() > 1e-3


def test_head_size_and_tied_ends(save_checkpoint, assert_same_logits):
    folder, reference = save_checkpoint(
        HFMistralConfig, sliding_window=9, head_dim=24, tie_word_embeddings=True
    )
    assert_same_logits(folder, reference)


def test_silent_fields_have_transformers_values():
    config = MistralConfig.from_hf(RAW)
    silent = HFMistralConfig(**{name: RAW[name] for name in RAW if name != "architectures"})
    assert config.windows == (silent.sliding_window,) * 2 == (4096, 4096)
    assert config.num_kv_heads == silent.num_key_value_heads == 8


def test_a_null_window_is_none():
    assert MistralConfig.from_hf(RAW | {"sliding_window": None}).windows == (None, None)


@pytest.mark.parametrize("window", [0, -1, 2.5, "4096", True])
def test_an_impossible_window_is_refused(window):
    with pytest.raises(CheckpointError, match="sliding_window is"):
        MistralConfig.from_hf(RAW | {"sliding_window": window})


@pytest.mark.parametrize("field", ["attention_bias", "mlp_bias", "layer_types"])
def test_fields_of_other_models_are_refused(field):
    with pytest.raises(UnsupportedModelError, match=f"the field {field} is True"):
        MistralConfig.from_hf(RAW | {field: True})


def test_a_folder_of_transformers_is_read(save_checkpoint):
    folder, _ = save_checkpoint(HFMistralConfig, sliding_window=11)
    config = load_config(folder)
    assert isinstance(config, MistralConfig)
    assert (config.num_layers, config.vocab_size, config.hidden_size) == (3, 1013, 64)
