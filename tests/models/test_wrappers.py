"""Multimodal checkpoints served for text: transformers' logits of text, from old and new files."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tests.models.family_shapes import (
    FAMILIES,
    GROWING_YARN,
    LOCAL_AND_GLOBAL,
    SMALL,
    SMALL_IDS,
)
from transformers import PreTrainedModel

from quire.errors import CheckpointError, UnsupportedModelError
from quire.models.architectures import MODELS
from quire.models.generation_config import load_generation_config
from quire.models.registry import load_config
from quire.models.wrappers import TEXT_MODELS, WRAPPERS, unwrapped

TINY = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1} | {
    "num_attention_heads": 2, "image_size": 28, "patch_size": 14
}  # fmt: skip
SIGLIP = {"model_type": "siglip_vision_model"} | TINY
CLIP = {"model_type": "clip_vision_model", "projection_dim": 16} | TINY
IDEFICS = TINY | {"image_size": 56}
PIXTRAL = {"model_type": "pixtral", "head_dim": 16} | TINY
QWEN_VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2} | {
    "out_hidden_size": 64, "patch_size": 14, "in_channels": 3, "window_size": 28
}  # fmt: skip
TEXT = SMALL | SMALL_IDS
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}

KEPT = FAMILIES["qwen3_5"][1].keys() - {"intermediate_size"}

# The wrapper's class -> its class of configs, its vision's config, its text's.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "Idefics3ForConditionalGeneration": (
        "Idefics3Config",
        IDEFICS,
        TEXT | {"model_type": "llama"},
    ),
    "Gemma3ForConditionalGeneration": (
        "Gemma3Config",
        SIGLIP,
        TEXT
        | {"model_type": "gemma3_text", "head_dim": 24, "sliding_window": 5}
        | {"rope_parameters": LOCAL_AND_GLOBAL},
    ),
    "Gemma4ForConditionalGeneration": (
        "Gemma4Config",
        TINY | {"model_type": "gemma4_vision", "head_dim": 16, "num_key_value_heads": 2},
        FAMILIES["gemma4"][1] | {"model_type": "gemma4_text"},
    ),
    "InternVLForConditionalGeneration": ("InternVLConfig", TINY, TEXT | {"model_type": "qwen3"}),
    "Lfm2VlForConditionalGeneration": (
        "Lfm2VlConfig",
        TINY | {"model_type": "siglip2_vision_model", "num_patches": 4, "vision_use_head": False},
        FAMILIES["lfm2"][1] | {"model_type": "lfm2"},
    ),
    "LlavaForConditionalGeneration": ("LlavaConfig", CLIP, TEXT | {"model_type": "llama"}),
    "LlavaNextForConditionalGeneration": (
        "LlavaNextConfig",
        CLIP,
        TEXT | {"model_type": "mistral", "sliding_window": 7},
    ),
    "LlavaOnevisionForConditionalGeneration": (
        "LlavaOnevisionConfig",
        SIGLIP,
        TEXT | {"model_type": "qwen2"},
    ),
    "Mistral3ForConditionalGeneration": (
        "Mistral3Config",
        PIXTRAL,
        TEXT | {"model_type": "ministral3", "head_dim": 24, "rope_parameters": GROWING_YARN},
    ),
    "Qwen2VLForConditionalGeneration": (
        "Qwen2VLConfig",
        QWEN_VISION | {"embed_dim": 32, "hidden_size": 64},
        TEXT | {"rope_parameters": MROPE},
    ),
    "Qwen2_5_VLForConditionalGeneration": (
        "Qwen2_5_VLConfig",
        QWEN_VISION,
        TEXT | {"rope_parameters": MROPE},
    ),
    "Qwen3VLForConditionalGeneration": (
        "Qwen3VLConfig",
        QWEN_VISION | {"deepstack_visual_indexes": [0]},
        TEXT | {"head_dim": 16, "rope_parameters": MROPE},
    ),
    "Qwen3VLMoeForConditionalGeneration": (
        "Qwen3VLMoeConfig",
        QWEN_VISION | {"deepstack_visual_indexes": [0]},
        TEXT
        | {"head_dim": 16, "rope_parameters": MROPE}
        | {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 40},
    ),
    "Qwen3_5ForConditionalGeneration": (
        "Qwen3_5Config",
        QWEN_VISION,
        FAMILIES["qwen3_5"][1] | SMALL_IDS,
    ),
    "Qwen3_5MoeForConditionalGeneration": (
        "Qwen3_5MoeConfig",
        QWEN_VISION,
        {name: value for name, value in FAMILIES["qwen3_5"][1].items() if name in KEPT}
        | {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
        | {"shared_expert_intermediate_size": 40}
        | SMALL_IDS,
    ),
    "SmolVLMForConditionalGeneration": (
        "SmolVLMConfig",
        IDEFICS,
        TEXT | {"model_type": "llama"},
    ),
}


def save_wrapped(name: str, folder: Path, **outer: Any) -> PreTrainedModel:
    class_name, vision, text = CASES[name]
    torch.manual_seed(0)
    config = getattr(transformers, class_name)(
        text_config=dict(text), vision_config=dict(vision), **outer
    )
    config._attn_implementation = "eager"
    model = getattr(transformers, name)(config).eval()
    with torch.no_grad():
        for each, parameter in model.named_parameters():
            parameter.normal_(0, 0.15)
            if "norm" in each and each.endswith("weight"):
                parameter += 1
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize("name", CASES)
def test_logits_of_text_equal_transformers(name, tmp_path, assert_same_logits):
    reference = save_wrapped(name, tmp_path)
    config = assert_same_logits(tmp_path, reference) and load_config(tmp_path)
    assert config.wrapper == name
    assert config.architecture in MODELS


def test_every_wrapper_is_tested():
    assert CASES.keys() == WRAPPERS.keys()


PREFIXES = {
    "transformers 5": ("model.language_model.", "model.", "lm_head."),
    "transformers 4": ("language_model.model.", "", "language_model.lm_head."),
    "none": ("model.", "", "lm_head."),
    "saved without its head": ("language_model.", "", "lm_head."),
    "the language model alone": ("", "", "lm_head."),
}


@pytest.mark.parametrize("prefixes", PREFIXES.values(), ids=PREFIXES.keys())
@pytest.mark.parametrize(
    "name", ["LlavaForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration"]
)
def test_files_of_all_times_are_read(name, prefixes, tmp_path, assert_same_logits):
    reference = save_wrapped(name, tmp_path, tie_word_embeddings=False)
    text, others, head = prefixes
    tensors = {}
    for each, tensor in load_file(tmp_path / "model.safetensors").items():
        wrapper, plain = WRAPPERS[name], WRAPPERS[name].rename(each)
        if plain is None:
            renamed = others + each.removeprefix("model.")
        elif plain.startswith("lm_head."):
            renamed = head + plain.removeprefix("lm_head.")
        else:
            renamed = text + plain.removeprefix("model.")
        if text:
            assert wrapper.rename(renamed) == plain
        tensors[renamed] = tensor
    tensors["mtp.layers.0.weight" if "Qwen" in name else "vision_tower.more"] = torch.zeros(3)
    save_file(tensors, tmp_path / "model.safetensors")
    assert_same_logits(tmp_path, reference)


def test_a_config_without_text_config(tmp_path, assert_same_logits):
    """As Qwen2.5-VL's own checkpoints have it."""
    reference = save_wrapped("Qwen2_5_VLForConditionalGeneration", tmp_path)
    path = tmp_path / "config.json"
    raw = json.loads(path.read_text())
    text = raw.pop("text_config")
    rope = text.pop("rope_parameters")
    theta, sections = rope["rope_theta"], rope["mrope_section"]
    raw = {**text, **raw, "rope_theta": theta, "vision_start_token_id": 3}
    raw["rope_scaling"] = {"type": "mrope", "mrope_section": sections}
    path.write_text(json.dumps(raw))
    assert_same_logits(tmp_path, reference)


def test_experts_may_be_stored_transposed(tmp_path, assert_same_logits):
    """As Qwen3-VL's mixtures were published."""
    reference = save_wrapped("Qwen3VLMoeForConditionalGeneration", tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    stacked = [name for name in tensors if ".experts." in name]
    assert {tuple(tensors[name].shape) for name in stacked} == {(5, 80, 64), (5, 64, 40)}
    for name in stacked:
        tensors[name] = tensors[name].transpose(1, 2).contiguous()
    save_file(tensors, path)
    assert_same_logits(tmp_path, reference)


def test_unknown_tensors_of_a_wrapper_are_refused(tmp_path, load):
    save_wrapped("LlavaForConditionalGeneration", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors | {"adapter.weight": torch.zeros(3)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"the weights have adapter\.weight"):
        load(tmp_path)


def test_a_tensor_under_two_prefixes_counts_where_both_are_equal(tmp_path, load):
    save_wrapped("LlavaForConditionalGeneration", tmp_path)
    path, ours = tmp_path / "model.safetensors", "model.norm.weight"
    rename = WRAPPERS["LlavaForConditionalGeneration"].rename
    tensors = load_file(path)
    (norm,) = (tensor for name, tensor in tensors.items() if rename(name) == ours)
    assert ours not in tensors
    save_file(tensors | {ours: norm.clone()}, path)
    load(tmp_path)
    save_file(tensors | {ours: norm + 1}, path)
    with pytest.raises(CheckpointError, match=r"either of which would be the model's 'model\.norm"):
        load(tmp_path)


RAW = {"architectures": ["LlavaForConditionalGeneration"], "vision_config": {}}


@pytest.mark.parametrize("name", [name for name in TEXT_MODELS if TEXT_MODELS[name].sizes])
def test_sizes_that_a_text_config_leaves_out_are_transformers(name):
    theirs = transformers.AutoConfig.for_model(name)
    for field, size in TEXT_MODELS[name].sizes.items():
        assert getattr(theirs, field) == size, field
    text, _ = unwrapped(RAW | {"text_config": {"model_type": name, "hidden_size": 96}})
    assert text["hidden_size"] == 96 and text["vocab_size"] == theirs.vocab_size


@pytest.mark.parametrize("name", CASES)
def test_ends_are_tied_as_in_transformers(name):
    class_name, _, text = CASES[name]
    theirs = getattr(transformers, class_name)(text_config=dict(text))
    kind = theirs.text_config.model_type
    raw = {"architectures": [name], "text_config": {"model_type": kind}}
    assert unwrapped(raw)[0]["tie_word_embeddings"] is theirs.tie_word_embeddings
    for outer, inner, expected in ((True, False, True), (None, True, True), (False, None, False)):
        raw["text_config"] = {"model_type": kind, "tie_word_embeddings": inner}
        tied = unwrapped(raw | {"tie_word_embeddings": outer})[0]["tie_word_embeddings"]
        assert tied is expected


def test_a_dtype_may_stand_outside():
    for inner, outer, expected in (
        ({}, {"torch_dtype": "bfloat16"}, {"torch_dtype": "bfloat16"}),
        ({"dtype": "float16"}, {"torch_dtype": "bfloat16"}, {"dtype": "float16"}),
    ):
        text, _ = unwrapped(RAW | outer | {"text_config": {"model_type": "llama"} | inner})
        assert {key: text[key] for key in text if key.endswith("dtype")} == expected


def test_other_language_models_are_refused_by_name():
    with pytest.raises(UnsupportedModelError, match="model_type of its text_config is 'mamba'"):
        unwrapped(RAW | {"text_config": {"model_type": "mamba"}})


@pytest.mark.parametrize("text", [None, [], "llama"])
def test_a_text_config_must_be_there(text):
    with pytest.raises(CheckpointError, match="has the text_config"):
        unwrapped(RAW | {"text_config": text})


def test_configs_without_wrapper_are_unchanged():
    raw = {"architectures": ["LlamaForCausalLM"], "text_config": {"model_type": "qwen2"}}
    assert unwrapped(raw) == (raw, None)


def test_overrides_are_of_the_language_model(tmp_path):
    save_wrapped("LlavaForConditionalGeneration", tmp_path)
    config = load_config(tmp_path, overrides={"rms_norm_eps": 0.5})
    assert config.rms_norm_eps == 0.5


@pytest.mark.parametrize("place", ["outer", "inner"])
def test_quantized_weights_are_refused(place, tmp_path):
    save_wrapped("LlavaForConditionalGeneration", tmp_path)
    path = tmp_path / "config.json"
    raw = json.loads(path.read_text())
    settings = {"quant_method": "hqq"}
    (raw if place == "outer" else raw["text_config"])["quantization_config"] = settings
    path.write_text(json.dumps(raw))
    with pytest.raises(UnsupportedModelError, match="quantized by HQQ"):
        load_config(tmp_path)


def test_end_tokens_of_the_language_model_count_where_there_are_no_others(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"text_config": {"eos_token_id": [5, 6]}}))
    assert load_generation_config(tmp_path).end_token_ids == (5, 6)
    path.write_text(json.dumps({"eos_token_id": 7, "text_config": {"eos_token_id": [5, 6]}}))
    assert load_generation_config(tmp_path).end_token_ids == (7,)
