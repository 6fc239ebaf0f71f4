"""OLMo 2 against transformers: norms behind the blocks, q/k norm over the whole width."""

import pytest
import torch
from transformers import Olmo2Config as HFOlmo2Config

from quire.errors import ConfigurationError, UnsupportedModelError
from quire.models.families.olmo2 import Olmo2Config
from quire.models.sharding import check_split

RAW = {
    "architectures": ["Olmo2ForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}

SHAPES = {
    "plain": {},
    "multi-head": {"num_key_value_heads": 4},
    "one layer, tied, with biases": {
        "attention_bias": True,
        "num_hidden_layers": 1,
        "tie_word_embeddings": True,
    },
    "large epsilon": {"rms_norm_eps": 0.1},
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_logits_equal_transformers(shape, save_checkpoint, assert_same_logits):
    folder, reference = save_checkpoint(HFOlmo2Config, **shape)
    model = assert_same_logits(folder, reference)
    assert model.model.layers[0].self_attn.k_norm.weight.shape == (
        16 * reference.config.num_key_value_heads,
    )


def test_norms_round_once_as_in_transformers(save_checkpoint, load, run):
    folder, reference = save_checkpoint(HFOlmo2Config)
    token_ids = torch.arange(100, 140)
    with torch.inference_mode():
        expected = reference.bfloat16()(token_ids[None]).logits[0].float()
    logits = run(load(folder, dtype=torch.bfloat16), token_ids, [40])
    assert (logits - expected).abs().mean() < 0.02 * expected.abs().mean()


def test_silent_fields_have_transformers_values():
    config = Olmo2Config.from_hf(RAW)
    silent = HFOlmo2Config(**{name: RAW[name] for name in RAW if name != "architectures"})
    assert config.rms_norm_eps == silent.rms_norm_eps == 1e-5
    assert not (config.qkv_bias or config.output_bias or config.mlp_bias)


def test_a_norm_over_all_heads_is_not_split_over_ranks():
    config = Olmo2Config.from_hf(RAW)
    check_split(config, 1)
    with pytest.raises(ConfigurationError, match=r"over all heads, .* can be split over 1$"):
        check_split(config, 2)


@pytest.mark.parametrize("field", ["clip_qkv", "mlp_bias", "sliding_window"])
def test_fields_of_other_models_are_refused(field):
    with pytest.raises(UnsupportedModelError, match=f"the field {field} is 7"):
        Olmo2Config.from_hf(RAW | {field: 7})
