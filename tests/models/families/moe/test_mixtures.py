"""Mixtures of experts against transformers: whole, in chunks, and one by one."""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedConfig

from quire.errors import CheckpointError
from quire.models.architectures import MODELS
from quire.models.checkpoints.loader import load_model
from quire.models.config import DecoderConfig
from quire.models.registry import load_config

EXPERTS = {"num_experts_per_tok": 3, "num_local_experts": 7}
SIZES = EXPERTS | {"moe_intermediate_size": 40, "head_dim": 16}
GROUPS = {
    "n_routed_experts": 12,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "n_group": 3,
    "topk_group": 2,
    "routed_scaling_factor": 1.7,
}
MULTIPLIERS = {
    "embedding_multiplier": 6.0,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.1,
    "logits_scaling": 0.5,
}
YARN = {
    "rope_parameters": {
        "rope_theta": 1e4,
        "rope_type": "yarn",
        "factor": 4.0,
        "truncate": False,
        "original_max_position_embeddings": 16,
    }
}

SHAPES: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "Qwen3-MoE": (transformers.Qwen3MoeConfig, SIZES),
    "Qwen3-MoE, weights that sum to 1": (
        transformers.Qwen3MoeConfig,
        SIZES | {"norm_topk_prob": True, "tie_word_embeddings": True},
    ),
    "Qwen3-MoE, some layers dense": (
        transformers.Qwen3MoeConfig,
        SIZES | {"decoder_sparse_step": 2, "num_hidden_layers": 4, "mlp_only_layers": [3]},
    ),
    "Qwen3-MoE, windows": (
        transformers.Qwen3MoeConfig,
        SIZES | {"use_sliding_window": True, "sliding_window": 10, "attention_bias": True},
    ),
    "Mixtral": (transformers.MixtralConfig, EXPERTS | {"sliding_window": 10}),
    "Mixtral, one expert": (transformers.MixtralConfig, EXPERTS | {"num_experts_per_tok": 1}),
    "OLMoE": (transformers.OlmoeConfig, {"num_experts": 7, "num_experts_per_tok": 3}),
    "OLMoE, weights that sum to 1": (
        transformers.OlmoeConfig,
        {"num_experts": 7, "num_experts_per_tok": 7, "norm_topk_prob": True},
    ),
    "Granite-MoE": (transformers.GraniteMoeConfig, EXPERTS | MULTIPLIERS),
    "gpt-oss": (
        transformers.GptOssConfig,
        EXPERTS | {"head_dim": 24, "sliding_window": 10, "swiglu_limit": 0.9, **YARN},
    ),
    "gpt-oss, without biases of attention": (
        transformers.GptOssConfig,
        EXPERTS | {"head_dim": 16, "attention_bias": False, "sliding_window": 5},
    ),
    "GLM-4-MoE": (transformers.Glm4MoeConfig, GROUPS),
    "GLM-4-MoE, one group, norms and biases": (
        transformers.Glm4MoeConfig,
        GROUPS
        | {"n_group": 1, "topk_group": 1, "n_shared_experts": 2, "head_dim": 24}
        | {"use_qk_norm": True, "attention_bias": True, "norm_topk_prob": False},
    ),
}


@pytest.mark.parametrize(("kind", "fields"), SHAPES.values(), ids=SHAPES.keys())
def test_logits_equal_transformers(kind, fields, save_checkpoint, assert_same_logits):
    folder, reference = save_checkpoint(kind, **fields)
    assert_same_logits(folder, reference)


def test_a_bias_counts_for_the_choice_alone(save_checkpoint, assert_same_logits):
    folder, reference = save_checkpoint(transformers.Glm4MoeConfig, **GROUPS)
    for name, buffer in reference.named_buffers():
        if "e_score_correction_bias" in name:
            buffer.normal_(0, 0.3, generator=torch.Generator().manual_seed(2))
    reference.save_pretrained(folder)
    model = assert_same_logits(folder, reference)
    correction = model.model.layers[1].mlp.gate.correction
    assert correction.dtype == torch.float32 and correction.std() > 0.1


@pytest.mark.parametrize("name", ["Qwen3-MoE", "Mixtral", "Granite-MoE", "GLM-4-MoE"])
def test_stacked_weights_as_transformers_has_them(name, save_checkpoint, assert_same_logits):
    kind, fields = SHAPES[name]
    folder, reference = save_checkpoint(kind, **fields)
    reference.save_pretrained(folder, save_original_format=False)
    assert_same_logits(folder, reference)


@pytest.mark.parametrize(
    "name", ["Qwen3-MoE", "OLMoE", "GLM-4-MoE", "Granite-MoE", "Mixtral", "gpt-oss"]
)
def test_silent_fields_have_transformers_values(name):
    kind, _ = SHAPES[name]
    raw = kind(hidden_size=4096, num_attention_heads=32).to_dict()
    needed = ("hidden_size", "intermediate_size", "vocab_size", "num_hidden_layers")
    needed += ("num_attention_heads", "max_position_embeddings")
    architecture = kind.__name__.replace("Config", "ForCausalLM")
    config = MODELS.get(architecture).config
    silent = {field: raw[field] for field in needed} | {"architectures": [architecture]}
    told = {**raw, "architectures": [architecture]}
    told = {field: value for field, value in told.items() if not field.startswith("_")}
    assert replace(config.from_hf(silent), dtype=None) == replace(config.from_hf(told), dtype=None)
    empty = silent | {"rope_scaling": {}}  # as good as none
    assert config.from_hf(empty) == config.from_hf(silent)


def test_numbers_that_do_not_fit_are_refused(save_checkpoint, edit_config):
    folder, _ = save_checkpoint(transformers.Qwen3MoeConfig, **SIZES)
    for fields, message in (
        ({"num_experts_per_tok": 8}, "top_k is 8, but must be 1 to 7"),
        ({"num_experts": 6}, "num_experts and num_local_experts are"),
        ({"mlp_only_layers": ["1"]}, "mlp_only_layers is"),
        ({"n_group": 2}, "num_groups is 2, but must divide num_experts, 7"),
        (
            {"num_experts": 65536, "num_local_experts": 65536},
            "a model of 196608 experts in all its layers, but at most 65536 are allowed",
        ),
    ):
        original = json.loads((folder / "config.json").read_text())
        edit_config(folder, **fields)
        with pytest.raises(CheckpointError, match=message):
            load_config(folder)
        (folder / "config.json").write_text(json.dumps(original))


def test_windows_are_of_all_layers_whatever_max_window_layers_says(
    save_checkpoint, edit_config, assert_same_logits
):
    fields = SIZES | {"use_sliding_window": True, "sliding_window": 10}
    folder, reference = save_checkpoint(transformers.Qwen3MoeConfig, **fields)
    edit_config(folder, max_window_layers=2)
    assert_same_logits(folder, reference)


def test_layers_that_predict_further_tokens_are_left_out(
    save_checkpoint, assert_same_logits, edit_config
):
    fields = GROUPS | {"num_hidden_layers": 4, "num_mtp_layers": 0}
    folder, reference = save_checkpoint(transformers.Glm4MoeConfig, **fields)
    reference.model.layers = reference.model.layers[:3]
    edit_config(folder, num_hidden_layers=3, num_nextn_predict_layers=1)
    assert_same_logits(folder, reference)
    for num_layers, num_predicting in ((3, 0), (2, 1)):
        edit_config(folder, num_hidden_layers=num_layers, num_nextn_predict_layers=num_predicting)
        with pytest.raises(CheckpointError, match=r"the weights have model.layers.3"):
            load_config_and_weights(folder)


def load_config_and_weights(folder):
    config = load_config(folder)
    cpu = torch.device("cpu")
    return load_model(folder, config, dtype=torch.float32, device=cpu, max_model_len=8)


def test_active_weights_count_only_the_chosen_experts(save_checkpoint):
    folder, _ = save_checkpoint(transformers.Glm4MoeConfig, **GROUPS)
    config = load_config(folder)
    assert isinstance(config, DecoderConfig)
    assert config.num_mlp_weights(0) == config.num_mlp_weights(0, active=True) == 3 * 64 * 96
    assert config.num_mlp_weights(1) == 64 * (3 * (12 + 1) * 24 + 12)
    assert config.num_mlp_weights(1, active=True) == 64 * (3 * (3 + 1) * 24 + 12)
