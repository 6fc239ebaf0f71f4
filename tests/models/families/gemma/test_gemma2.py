"""Gemma 2 against transformers: soft caps, norms on both sides, scaled embeddings."""

import pytest
import torch
from tests.models.family_shapes import FAMILIES
from transformers import Gemma2Config as HFGemma2Config

from quire.errors import CheckpointError, UnsupportedModelError
from quire.models.families.gemma.gemma2 import Gemma2Config

RAW = {
    "architectures": ["Gemma2ForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}

SHAPES = {
    "all": FAMILIES["gemma2"][1],
    "no caps": {"attn_logit_softcapping": None, "final_logit_softcapping": None, "head_dim": 32},
    "scores capped": {"attn_logit_softcapping": 1.5, "sliding_window": 11},
    "biases, untied, gelu": {
        "attention_bias": True,
        "tie_word_embeddings": False,
        "hidden_activation": "gelu",
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
    },
    "kinds named": {
        "sliding_window": 4,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    },
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_logits_equal_transformers(shape, save_checkpoint, assert_same_logits):
    folder, reference = save_checkpoint(HFGemma2Config, **shape)
    model = assert_same_logits(folder, reference)
    config = reference.config
    for kind, spec in zip(config.layer_types, model.attention_specs, strict=True):
        assert spec.window == (config.sliding_window if kind == "sliding_attention" else None)
        assert spec.soft_cap == config.attn_logit_softcapping


def test_rounds_as_transformers(save_checkpoint, load, run):
    folder, reference = save_checkpoint(
        HFGemma2Config, **(FAMILIES["gemma2"][1] | {"hidden_size": 60})
    )
    token_ids = torch.arange(100, 140)
    with torch.inference_mode():
        expected = reference.bfloat16()(token_ids[None]).logits[0].float()
        embeds = reference.model.embed_tokens(token_ids)
    model = load(folder, dtype=torch.bfloat16)
    logits = run(model, token_ids, [40])
    assert (logits - expected).abs().mean() < 0.03 * expected.abs().mean()
    assert torch.equal(model.embed(token_ids), embeds)


def test_silent_fields_have_transformers_values():
    config = Gemma2Config.from_hf(RAW)
    silent = HFGemma2Config(**{name: RAW[name] for name in RAW if name != "architectures"})
    assert config.head_dim == silent.head_dim == 256
    assert config.num_kv_heads == silent.num_key_value_heads == 4
    assert config.attention_scale == silent.query_pre_attn_scalar**-0.5
    assert config.attention_soft_cap == silent.attn_logit_softcapping == 50.0
    assert config.logits_soft_cap == silent.final_logit_softcapping == 30.0
    assert config.windows == (silent.sliding_window, None, silent.sliding_window)
    assert config.tie_word_embeddings is silent.tie_word_embeddings is True
    assert config.activation.value == "gelu_tanh"


def test_fields_of_published_configs_are_understood():
    Gemma2Config.from_hf(
        RAW
        | {"cache_implementation": "hybrid", "hidden_act": "gelu", "sliding_window_size": 4096}
        | {"hidden_activation": "gelu_pytorch_tanh"}
    )


@pytest.mark.parametrize("cap", [0, -1.0, "50"])
def test_an_impossible_cap_is_refused(cap):
    with pytest.raises(CheckpointError, match="final_logit_softcapping is"):
        Gemma2Config.from_hf(RAW | {"final_logit_softcapping": cap})


@pytest.mark.parametrize(
    "field", ["use_bidirectional_attention", "sliding_window_size", "enable_moe_block"]
)
def test_fields_of_other_models_are_refused(field):
    with pytest.raises(UnsupportedModelError, match=f"{field} is 7"):
        Gemma2Config.from_hf(RAW | {field: 7})
