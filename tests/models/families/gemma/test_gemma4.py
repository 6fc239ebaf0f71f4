"""Gemma 4's text against transformers: two kinds of heads, shared keys, inputs of each layer."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.models.family_shapes import FAMILIES
from transformers import Gemma4TextConfig as HFGemma4Config

from quire.errors import CheckpointError, UnsupportedModelError
from quire.kernels.routing import RouterSpec, route
from quire.models.families.gemma.gemma4 import Gemma4Config
from quire.models.interface import InputEmbeds
from quire.models.registry import load_config

RAW = {
    "architectures": ["Gemma4ForCausalLM"],
    "vocab_size": 100,
    "vocab_size_per_layer_input": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "max_position_embeddings": 64,
}
F32 = torch.float32
ROUNDING = 2e-4
"""Attention's scores are not divided by the root of the head's size, and rounding grows with them:
transformers itself is 0.85e-4 away from its logits in float64 (divided: 0.06e-4)."""
ALL = FAMILIES["gemma4"][1]
# transformers can't share keys where layers have no inputs of their own.
WITHOUT_INPUTS = ALL | {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0}

SHAPES = {
    "all": ALL,
    "no inputs of layers": WITHOUT_INPUTS,
    "three layers, nothing shared": ALL | {"num_kv_shared_layers": 0, "num_hidden_layers": 3}
    | {"layer_types": ALL["layer_types"][:3]},
    "values of their own": ALL | {"attention_k_eq_v": False, "num_kv_shared_layers": 1},
    "single width, biases, untied": ALL
    | {"use_double_wide_mlp": False, "attention_bias": True, "tie_word_embeddings": False},
    "experts": FAMILIES["gemma4-moe"][1],
    "experts and inputs of layers": ALL
    | {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 3}
    | {"moe_intermediate_size": 24},
    "half turns, no cap": ALL
    | {"final_logit_softcapping": None, "num_kv_shared_layers": 3}
    | {
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
            "full_attention": {
                "rope_type": "proportional",
                "rope_theta": 300.0,
                "partial_rotary_factor": 0.5,
            },
        }
    },
}  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_logits_equal_transformers(shape, save_checkpoint, assert_same_logits):
    folder, reference = save_checkpoint(HFGemma4Config, **shape)
    model = assert_same_logits(folder, reference, rounding=ROUNDING)
    num_storing = shape.get("num_hidden_layers", 3)
    assert len(model.attention_specs) == num_storing - shape.get("num_kv_shared_layers", 0)
    sizes = {spec.window: spec.head_dim for spec in model.attention_specs}
    assert sizes == {5: 24, None: 40}


def test_rounds_as_transformers(save_checkpoint, load, run):
    folder, reference = save_checkpoint(HFGemma4Config, **ALL)
    token_ids = torch.arange(100, 140)
    with torch.inference_mode():
        expected = reference.bfloat16()(token_ids[None]).logits[0].float()
    logits = run(load(folder, dtype=torch.bfloat16), token_ids, [40])
    assert (logits - expected).abs().mean() < 0.05 * expected.abs().mean()


def test_keys_that_no_layer_stores_are_left_out(save_checkpoint, assert_same_logits):
    folder, reference = save_checkpoint(HFGemma4Config, **ALL)
    path = folder / "model.safetensors"
    spare = {
        f"model.layers.5.self_attn.{name}.weight": torch.zeros(3) for name in ("k_proj", "v_norm")
    }
    save_file(load_file(path) | spare, path)
    assert_same_logits(folder, reference)


def test_the_form_of_published_configs_is_read(save_checkpoint, edit_config):
    folder, _ = save_checkpoint(HFGemma4Config, **ALL)
    written = load_config(folder)
    edit_config(
        folder,
        remove=("per_layer_config",),
        global_head_dim=40,
        num_global_key_value_heads=1,
        use_bidirectional_attention="vision",
    )
    found = load_config(folder)
    assert found == replace(written, sees_ahead=True)
    assert [spec.sees_ahead for spec in found.attention_specs] == [
        spec.window is not None for spec in found.attention_specs
    ]
    assert written.attention_spec(2).num_kv_heads == 1


@pytest.mark.parametrize(
    "changes",
    [
        # Numbers of layers are written with two digits each.
        {"num_hidden_layers": 12, "layer_types": ALL["layer_types"] * 2},
        {"global_head_dim": 24},
        {"global_head_dim": 24, "num_global_key_value_heads": None},
    ],
    ids=["twelve layers", "heads of one size", "nothing differs"],
)
def test_per_layer_configs_are_read_as_transformers_writes_them(
    changes, save_checkpoint, assert_same_logits
):
    folder, reference = save_checkpoint(HFGemma4Config, **(ALL | changes))
    assert "per_layer_config" in (folder / "config.json").read_text()
    assert_same_logits(folder, reference)


def test_input_embeds_leave_each_layer_its_own_embedding(save_checkpoint, load, dense_attention):
    """Of the token id, whose main embedding alone is replaced."""
    model = load(save_checkpoint(HFGemma4Config, **ALL)[0])
    token_ids, places = torch.arange(5), torch.tensor([1, 3])

    def run(factor: float | None, ids: torch.Tensor) -> torch.Tensor:
        rows = None if factor is None else factor * model.embed(token_ids[places])
        embeds = None if rows is None else InputEmbeds(places, rows)
        return model(ids, token_ids, dense_attention(model), input_embeds=embeds)

    expected = run(None, token_ids)
    assert torch.equal(run(1.0, token_ids), expected)
    others = token_ids.clone()
    others[places] = 50
    for changed in (run(2.0, token_ids), run(1.0, others)):
        assert torch.equal(changed[0], expected[0])
        assert not torch.isclose(changed[1:], expected[1:]).all(-1).any()


def test_silent_fields_have_transformers_values():
    config = Gemma4Config.from_hf(RAW)
    silent = HFGemma4Config(**{name: RAW[name] for name in RAW if name != "architectures"})
    assert config.layer_types == tuple(silent.layer_types)
    assert config.per_layer_size == silent.hidden_size_per_layer_input == 256
    assert config.num_shared_layers == silent.num_kv_shared_layers == 0
    assert config.keys_are_values is silent.attention_k_eq_v is False
    assert config.is_double_wide is silent.use_double_wide_mlp is False
    assert config.windows == (512,) * 5 + (None, 512, None)
    for layer, theirs in enumerate(silent.per_layer_config[i] for i in range(8)):
        spec = config.attention_spec(layer)
        assert (spec.head_dim, spec.num_kv_heads) == (theirs.head_dim, theirs.num_key_value_heads)
    for each, kind in zip(config.ropes, ("full_attention", "sliding_attention"), strict=True):
        theirs = silent.rope_parameters[kind]
        assert each.rope.type_name == theirs["rope_type"]
        assert each.rope.rope_theta == theirs["rope_theta"]
    assert config.rope.partial_rotary_factor == 0.25


def test_layers_read_what_the_last_of_their_kind_stored():
    config = Gemma4Config.from_hf(RAW | {"num_kv_shared_layers": 2})
    assert [config.stored_by(layer) for layer in range(8)] == [0, 1, 2, 3, 4, 5, 4, 5]
    assert [config.mlp_size(layer) for layer in (5, 6)] == [96, 96]
    wide = Gemma4Config.from_hf(RAW | {"num_kv_shared_layers": 2, "use_double_wide_mlp": True})
    assert [wide.mlp_size(layer) for layer in (5, 6)] == [96, 192]


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"num_kv_shared_layers": 6}, CheckpointError, "num_kv_shared_layers is 6"),
        ({"vocab_size_per_layer_input": 99}, UnsupportedModelError, "per_layer_input is 99"),
        ({"enable_moe_block": True}, CheckpointError, "has no num_experts"),
        (
            {"enable_moe_block": True, "num_experts": 2, "top_k_experts": 3}
            | {"moe_intermediate_size": 8},
            CheckpointError,
            "top_k is 3, but must be 1 to 2",
        ),
        ({"use_bidirectional_attention": "all"}, UnsupportedModelError, "is 'all'"),
        ({"query_pre_attn_scalar": 256}, UnsupportedModelError, "attn_scalar is 256"),
        ({"attn_logit_softcapping": 50.0}, UnsupportedModelError, "logit_softcapping is 50"),
        ({"per_layer_config": {"1": {}}}, UnsupportedModelError, "per_layer_config is"),
        ({"per_layer_config": []}, UnsupportedModelError, "per_layer_config is"),
        ({"per_layer_config": {"9" * 5000: {}}}, UnsupportedModelError, "per_layer_config is"),
        ({"per_layer_config": {"x": {}}}, UnsupportedModelError, "per_layer_config is"),
        (
            {"per_layer_config": {"5": {"sliding_window": 3}, "7": {"sliding_window": 3}}},
            UnsupportedModelError,
            "per_layer_config is",
        ),
        (
            {"num_global_key_value_heads": 3, "attention_k_eq_v": True},
            CheckpointError,
            "must be a multiple of num_global_key_value_heads, 3",
        ),
    ],
)
def test_unknown_config_values_are_refused_by_name(fields, error, message):
    with pytest.raises(error, match=message):
        Gemma4Config.from_hf(RAW | fields)


def test_ranks_share_the_heads_of_both_kinds():
    fields = {"num_global_key_value_heads": 2, "attention_k_eq_v": True}
    config = Gemma4Config.from_hf(RAW | fields)
    assert config.why_not_split(4) is None
    share = config.share_of(1, 4)
    assert [(spec.num_heads, spec.num_kv_heads) for spec in share.attention_specs[4:6]] == [
        (2, 1),
        (2, 1),
    ]
    three = Gemma4Config.from_hf(
        RAW | {"num_attention_heads": 12, "num_key_value_heads": 12} | fields
    )
    assert "2 KV heads of the model's layers with full attention" in three.why_not_split(3)


def test_factors_of_experts_multiply_weights_and_change_no_choice():
    spec = RouterSpec(num_experts=4, top_k=2, renormalizes=True, has_scales=True)
    plain = RouterSpec(num_experts=4, top_k=2, renormalizes=True)
    logits, scales = torch.randn(5, 4), torch.tensor([-3.0, 0.5, 2.0, 100.0])
    scaled, expected = route(logits, scales, spec, F32), route(logits, None, plain, F32)
    assert torch.equal(scaled.ids, expected.ids)
    assert torch.equal(scaled.weights, expected.weights * scales[expected.ids])
