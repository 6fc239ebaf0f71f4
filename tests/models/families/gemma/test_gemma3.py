"""Gemma 3's text against transformers: two rotations, and norms of q and k by 1 + weight."""

import pytest
import torch
from tests.models.family_shapes import FAMILIES
from transformers import Gemma3TextConfig as HFGemma3Config

from quire.errors import UnsupportedModelError
from quire.models.families.gemma.gemma3 import Gemma3Config

RAW = {
    "architectures": ["Gemma3ForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "factor": 8.0}

SHAPES = {
    "all": FAMILIES["gemma3"][1],
    "six layers": {"num_hidden_layers": 6, "sliding_window": 6, "head_dim": 16},
    "capped logits, biases, untied": {
        "final_logit_softcapping": 4.0,
        "attention_bias": True,
        "tie_word_embeddings": False,
        "head_dim": 32,
        "sliding_window": 8,
    },
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_logits_equal_transformers(shape, save_checkpoint, assert_same_logits):
    folder, reference = save_checkpoint(HFGemma3Config, **shape)
    model = assert_same_logits(folder, reference)
    windows = [
        shape["sliding_window"] if kind == "sliding_attention" else None
        for kind in reference.config.layer_types
    ]
    assert [spec.window for spec in model.attention_specs] == windows


def test_rounds_as_transformers(save_checkpoint, load, run):
    folder, reference = save_checkpoint(HFGemma3Config, **FAMILIES["gemma3"][1])
    token_ids = torch.arange(100, 140)
    with torch.inference_mode():
        expected = reference.bfloat16()(token_ids[None]).logits[0].float()
    logits = run(load(folder, dtype=torch.bfloat16), token_ids, [40])
    assert (logits - expected).abs().mean() < 0.03 * expected.abs().mean()


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"rope_theta": 100.0, "rope_local_base_freq": 50.0, "rope_scaling": LINEAR},
        {"sliding_window_pattern": 2},
    ],
)
def test_silent_fields_have_transformers_values(fields):
    config = Gemma3Config.from_hf(RAW | fields)
    silent = HFGemma3Config(
        **{name: RAW[name] for name in RAW if name != "architectures"},
        **{
            name: dict(value) if name == "rope_scaling" else value for name, value in fields.items()
        },
    )
    assert config.head_dim == silent.head_dim == 256
    assert config.logits_soft_cap is silent.final_logit_softcapping is None
    kinds = ["full_attention", "sliding_attention"]
    assert config.layer_ropes == tuple(map(kinds.index, silent.layer_types))
    theirs = [silent.rope_parameters[kind] for kind in kinds]
    assert [each.rope.rope_theta for each in config.ropes] == [
        each["rope_theta"] for each in theirs
    ]
    assert [each.rope.type_name for each in config.ropes] == [each["rope_type"] for each in theirs]
    assert [window is None for window in config.windows] == [
        kind == "full_attention" for kind in silent.layer_types
    ]


@pytest.mark.parametrize(
    "field", ["use_bidirectional_attention", "attn_logit_softcapping", "enable_moe_block"]
)
def test_fields_of_other_models_are_refused(field):
    with pytest.raises(UnsupportedModelError, match=f"{field} is 7"):
        Gemma3Config.from_hf(RAW | {field: 7})


def test_rope_parameters_that_are_of_no_kind_of_layer_are_refused():
    """transformers takes its default values in their place."""
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0}
    with pytest.raises(UnsupportedModelError, match="must have an object for each kind of layer"):
        Gemma3Config.from_hf(RAW | {"rope_parameters": rope})
