"""Llama against transformers, in the shapes that published and odd checkpoints have."""

import pytest
import torch
from transformers import LlamaConfig as HFLlamaConfig

from quire.errors import UnsupportedModelError
from quire.models.families.llama import LlamaConfig, LlamaForCausalLM
from quire.models.interface import InputEmbeds
from quire.models.registry import load_config

RAW = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}

SHAPES = {
    "plain": {},
    "head size of its own": {"head_dim": 80, "hidden_size": 96},
    "7 query heads per KV head": {
        "num_attention_heads": 7,
        "num_key_value_heads": 1,
        "hidden_size": 56,
    },
    "14 query heads on 2": {
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "hidden_size": 112,
        "head_dim": 12,
    },
    "multi-query": {"num_key_value_heads": 1},
    "multi-head": {"num_key_value_heads": None},
    "attention bias": {"attention_bias": True},
    "MLP bias": {"mlp_bias": True},
    "tied": {"tie_word_embeddings": True},
    "one layer": {"num_hidden_layers": 1},
    "large epsilon": {"rms_norm_eps": 0.1},
}

ROPES = {
    "theta": {"rope_type": "default", "rope_theta": 500.0},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "dynamic beyond training": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16},
    "yarn, all options": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "beta_fast": 16.0,
        "beta_slow": 0.5,
        "mscale": 0.7,
        "mscale_all_dim": 0.9,
        "truncate": False,
    },
    "longrope, long": {
        "rope_type": "longrope",
        "original_max_position_embeddings": 16,
        "short_factor": [1.0] * 8,
        "long_factor": [1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0],
    },
    "longrope, short": {
        "rope_type": "longrope",
        "original_max_position_embeddings": 48,
        "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
        "long_factor": [9.0] * 8,
        "attention_factor": 1.2,
    },
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_logits_equal_transformers(shape, save_checkpoint, assert_same_logits):
    folder, reference = save_checkpoint(HFLlamaConfig, **shape)
    assert_same_logits(folder, reference)


@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES.keys())
def test_rope_types_equal_transformers(rope, save_checkpoint, assert_same_logits):
    trained = 32 if rope["rope_type"] == "dynamic" else 64
    folder, reference = save_checkpoint(
        HFLlamaConfig,
        max_position_embeddings=trained,
        rope_parameters={"rope_theta": 10000.0} | rope,
    )
    assert_same_logits(folder, reference)


def test_the_older_form_of_rope_scaling_means_the_same(
    save_checkpoint, assert_same_logits, edit_config
):
    rope = {"rope_theta": 5000.0, "rope_type": "linear", "factor": 3.0}
    folder, reference = save_checkpoint(HFLlamaConfig, rope_parameters=rope)
    edit_config(
        folder,
        remove=("rope_parameters",),
        rope_theta=5000.0,
        rope_scaling={"type": "linear", "factor": 3.0},
    )
    assert_same_logits(folder, reference)


def test_sharded_weights_equal_transformers(save_checkpoint, assert_same_logits):
    folder, reference = save_checkpoint(HFLlamaConfig, max_shard_size="200KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    assert_same_logits(folder, reference)


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_cached_keys_keep_their_meaning_as_the_context_grows(rope_type, save_checkpoint, load, run):
    """A short prompt has the same logits as the same tokens at the start of a long one."""
    rope = {"rope_theta": 10000.0, "rope_type": rope_type, "factor": 4.0}
    if rope_type == "longrope":
        rope |= {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
        rope |= {"original_max_position_embeddings": 16}
    folder, _ = save_checkpoint(HFLlamaConfig, max_position_embeddings=16, rope_parameters=rope)
    model = load(folder)
    token_ids = torch.arange(48)
    torch.testing.assert_close(
        run(model, token_ids[:8], [8]), run(model, token_ids, [48])[:8], atol=1e-5, rtol=1e-5
    )


def test_bfloat16_stays_close_to_transformers(save_checkpoint, load, run):
    folder, reference = save_checkpoint(HFLlamaConfig)
    token_ids = torch.arange(100, 140)
    with torch.inference_mode():
        expected = reference.bfloat16()(token_ids[None]).logits[0].float()
    model = load(folder, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    logits = run(model, token_ids, [40])
    assert logits.dtype == torch.float32
    # bf16 has 8 bits: the two differ in how attention rounds, by far less than the logits' size.
    assert (logits - expected).abs().mean() < 0.02 * expected.abs().mean()


def test_greedy_generation_equals_transformers(save_checkpoint, load, run):
    folder, reference = save_checkpoint(HFLlamaConfig, attention_bias=True)
    model = load(folder)
    token_ids = torch.tensor([5, 900, 17])
    expected = reference.generate(
        token_ids[None], max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0
    )[0]
    while len(token_ids) < len(expected):
        logits = run(model, token_ids, [len(token_ids)])
        token_ids = torch.cat((token_ids, logits[-1:].argmax(-1)))
    assert token_ids.tolist() == expected.tolist()


def test_input_embeds_take_the_place_of_token_ids(save_checkpoint, load, dense_attention):
    folder, _ = save_checkpoint(HFLlamaConfig)
    model = load(folder)
    token_ids, positions = torch.arange(9), torch.arange(9)
    embeds = InputEmbeds(torch.tensor([7, 2, 3]), model.embed(torch.tensor([7, 2, 3])))
    before = embeds.rows.clone()
    by_ids = model(token_ids, positions, dense_attention(model))
    others = token_ids.index_fill(0, embeds.places, 50)
    by_embeds = model(others, positions, dense_attention(model), input_embeds=embeds)
    assert torch.equal(by_ids, by_embeds)
    assert torch.equal(embeds.rows, before)  # the caller's tensor is not written to


def test_building_a_model_draws_no_random_numbers_and_trains_nothing(save_checkpoint):
    folder, _ = save_checkpoint(HFLlamaConfig)
    config = load_config(folder)
    before = torch.get_rng_state()
    model = LlamaForCausalLM(
        config, dtype=torch.float32, device=torch.device("cpu"), max_model_len=32
    )
    assert torch.equal(torch.get_rng_state(), before)
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_attention_bias_is_on_all_four_projections():
    config = LlamaConfig.from_hf(RAW | {"attention_bias": True, "mlp_bias": True})
    assert config.qkv_bias and config.output_bias and config.mlp_bias
    plain = LlamaConfig.from_hf(RAW)
    assert not (plain.qkv_bias or plain.output_bias or plain.mlp_bias or plain.qk_norm)
    assert plain.windows == (None, None)


@pytest.mark.parametrize("field", ["sliding_window", "qk_layernorm", "quantization_config"])
def test_fields_of_other_models_are_refused(field):
    with pytest.raises(UnsupportedModelError, match=f"the field {field} is 7"):
        LlamaConfig.from_hf(RAW | {field: 7})
