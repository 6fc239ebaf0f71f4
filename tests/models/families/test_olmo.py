"""OLMo against transformers: LayerNorm without weights."""

import pytest
import torch
from tests.models.family_shapes import FAMILIES
from transformers import OlmoConfig as HFOlmoConfig

from quire.errors import UnsupportedModelError
from quire.models.families.olmo import OlmoConfig

RAW = {
    "architectures": ["OlmoForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}

SHAPES = {
    "all": FAMILIES["olmo"][1],
    "tied": {"tie_word_embeddings": True},
    "multi-head": {"num_key_value_heads": None},
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_logits_equal_transformers(shape, save_checkpoint, assert_same_logits):
    folder, reference = save_checkpoint(HFOlmoConfig, **shape)
    model = assert_same_logits(folder, reference)
    assert not [name for name, _ in model.named_parameters() if "norm" in name]


def test_rounds_as_transformers(save_checkpoint, load, run):
    folder, reference = save_checkpoint(HFOlmoConfig)
    token_ids = torch.arange(100, 140)
    with torch.inference_mode():
        expected = reference.bfloat16()(token_ids[None]).logits[0].float()
    logits = run(load(folder, dtype=torch.bfloat16), token_ids, [40])
    assert (logits - expected).abs().mean() < 0.02 * expected.abs().mean()


def test_silent_fields_have_transformers_values():
    config = OlmoConfig.from_hf(RAW)
    silent = HFOlmoConfig(**{name: RAW[name] for name in RAW if name != "architectures"})
    assert config.num_kv_heads == silent.num_key_value_heads == 4
    assert config.qkv_bias is config.output_bias is silent.attention_bias is False
    assert config.rms_norm_eps == 1e-5


@pytest.mark.parametrize("field", ["clip_qkv", "rms_norm_eps", "mlp_bias"])
def test_fields_of_other_models_are_refused(field):
    with pytest.raises(UnsupportedModelError, match=f"{field} is 7"):
        OlmoConfig.from_hf(RAW | {field: 7})
