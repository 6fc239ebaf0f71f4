"""Qwen3 against transformers: q/k norm, a head size of its own, windows; and the embedded model."""

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers import Qwen3Config as HFQwen3Config

from quire.hub.model_folder import EMBEDDED_MODEL
from quire.models.families.qwen3 import Qwen3Config

RAW = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}

SHAPES = {
    "plain": {"head_dim": 16},
    "head size 80": {"head_dim": 80},
    "head size 128": {},
    "tied": {"head_dim": 16, "tie_word_embeddings": True},
    "7 query heads per KV head": {
        "head_dim": 16,
        "num_attention_heads": 7,
        "num_key_value_heads": 1,
        "hidden_size": 56,
    },
    "attention bias": {"head_dim": 16, "attention_bias": True},
    "windows": {
        "head_dim": 16,
        "use_sliding_window": True,
        "sliding_window": 10,
        "max_window_layers": 2,
    },
    "yarn": {
        "head_dim": 16,
        "rope_parameters": {
            "rope_theta": 10000.0,
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    },
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_logits_equal_transformers(shape, save_checkpoint, assert_same_logits):
    folder, reference = save_checkpoint(HFQwen3Config, **shape)
    assert_same_logits(folder, reference)


def test_silent_fields_have_transformers_values():
    config = Qwen3Config.from_hf(RAW)
    silent = HFQwen3Config(**{name: RAW[name] for name in RAW if name != "architectures"})
    assert config.head_dim == silent.head_dim == 128
    assert config.qk_norm
    assert not (config.qkv_bias or config.output_bias or config.mlp_bias)
    assert config.attention_specs[0].scale == 128**-0.5


def test_the_embedded_model_equals_transformers(load, run):
    reference = AutoModelForCausalLM.from_pretrained(
        EMBEDDED_MODEL, dtype=torch.float32, attn_implementation="eager"
    )
    model = load(EMBEDDED_MODEL, max_model_len=256)
    token_ids = torch.randint(0, 4096, (200,), generator=torch.Generator().manual_seed(3))
    with torch.inference_mode():
        expected = reference(token_ids[None]).logits[0]
    logits = run(model, token_ids, [100, 1, 64, 35])
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-5)
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))
