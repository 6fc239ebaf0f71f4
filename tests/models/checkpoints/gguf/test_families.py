"""A converted model is read as the folder that it was converted from: its config, its tensors."""

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.gguf_writer import write_gguf
from tests.models.checkpoints.gguf.conversion import Conversion, convert, metadata, random_model
from tests.models.checkpoints.gguf.conversions import CONVERSIONS, OTHER_LLAMA_3
from tests.models.checkpoints.gguf.converters import rope_freqs

from quire.core.pooling import PoolingKind
from quire.errors import CheckpointError, UnsupportedModelError
from quire.layers.rotary import LongRope
from quire.models.checkpoints.gguf.families.architectures import ARCHITECTURES
from quire.models.checkpoints.gguf.gguf_files import GGUFFiles
from quire.models.checkpoints.gguf.gguf_model import GGUFModel
from quire.models.checkpoints.source import CheckpointSource
from quire.models.pooling_config import PoolingFolder, read_pooling
from quire.models.registry import find_entry, load_config


def whole(source: CheckpointSource, name: str) -> torch.Tensor:
    parts = []
    for span in source.pieces(name):
        with source.rows(name, span) as rows:
            parts.append(rows.float())
    return torch.cat(parts)


@pytest.mark.parametrize("name", CONVERSIONS)
def test_a_gguf_conversion_gives_the_original_logits(name, tmp_path):
    conversion = CONVERSIONS[name]
    raw, model = random_model(conversion)
    folder = tmp_path / "original"
    model.save_pretrained(folder)
    path = convert(conversion, raw, model, tmp_path / "model.gguf")
    expected, config = load_config(folder), load_config(path)
    assert type(config) is type(expected)
    for field in fields(config):
        wanted = conversion.unlike.get(field.name, getattr(expected, field.name))
        assert getattr(config, field.name) == wanted, field.name
    entry = find_entry(expected)
    original, found = entry.open(folder, expected), entry.open(path, config)
    assert found.names == original.names
    for tensor in original.names:
        assert found.shape(tensor) == original.shape(tensor), tensor
        torch.testing.assert_close(
            whole(found, tensor), whole(original, tensor), rtol=1e-6, atol=1e-6, msg=tensor
        )


def test_every_architecture_is_tried():
    assert {conversion.architecture for conversion in CONVERSIONS.values()} == ARCHITECTURES.keys()


def test_other_factors_of_frequencies_are_taken_as_they_are(tmp_path):
    conversion = Conversion("llama", "llama", {"rope_parameters": OTHER_LLAMA_3, "head_dim": 64})
    raw, model = random_model(conversion)
    tensors = rope_freqs(raw)
    conversion = Conversion("llama", "llama", conversion.changes, extra=lambda _: tensors)
    config = load_config(convert(conversion, raw, model, tmp_path / "model.gguf"))
    assert isinstance(config.rope, LongRope)
    expected = tensors["rope_freqs.weight"]
    torch.testing.assert_close(torch.tensor(config.rope.long_factor), expected)
    assert config.rope.long_factor == config.rope.short_factor
    assert config.rope.attention_factor == 1.0


def test_a_field_that_is_not_understood_is_refused(tmp_path):
    conversion = CONVERSIONS["qwen3"]
    raw, _ = random_model(conversion)
    known = metadata(conversion, raw)
    tensors = {name: torch.ones(5, 64) for name in ("token_embd.weight", "output.weight", "x")}
    for value in (0, 0.0, False, ""):
        write_gguf(tmp_path / "x.gguf", known | {"qwen3.attention.new": value}, tensors)
        assert GGUFFiles.read_config(tmp_path)["vocab_size"] == 5
    for value in (1, 0.5, True, "new", [1]):
        write_gguf(tmp_path / "x.gguf", known | {"qwen3.attention.new": value}, tensors)
        with pytest.raises(UnsupportedModelError, match=r"field qwen3.attention.new is"):
            GGUFFiles.read_config(tmp_path)


def test_an_architecture_that_is_not_read_is_named_with_those_that_are(tmp_path):
    path = write_gguf(tmp_path / "x.gguf", {"general.architecture": "rwkv7"}, {})
    with pytest.raises(
        UnsupportedModelError, match=r"architecture rwkv7, but quire reads only .*qwen3"
    ):
        load_config(path)


@pytest.mark.parametrize(
    "pooling_type, kind",
    [(None, None), (0, None), (1, PoolingKind.MEAN), (2, PoolingKind.CLS), (3, PoolingKind.LAST)],
)
def test_pooling(pooling_type, kind, tmp_path):
    raw, _ = random_model(CONVERSIONS["qwen3"])
    fields = metadata(CONVERSIONS["qwen3"], raw)
    fields |= {} if pooling_type is None else {"qwen3.pooling_type": pooling_type}
    tensors = {name: torch.ones(5, 64) for name in ("token_embd.weight", "output.weight", "x")}
    path = write_gguf(tmp_path / "x.gguf", fields, tensors)
    said = None if kind is None else PoolingFolder(kind, normalize=True)
    assert read_pooling(path) == read_pooling(tmp_path) == said
    assert load_config(path).vocab_size == 5


def test_a_head_that_scores_is_refused(tmp_path):
    raw, _ = random_model(CONVERSIONS["qwen3"])
    fields = metadata(CONVERSIONS["qwen3"], raw) | {"qwen3.pooling_type": 4}
    tensors = {name: torch.ones(5, 64) for name in ("token_embd.weight", "output.weight", "x")}
    path = write_gguf(tmp_path / "x.gguf", fields, tensors)
    with pytest.raises(UnsupportedModelError, match=r"qwen3.pooling_type is 4, which quire does"):
        load_config(path)


def read_with(conversion: Conversion, tmp_path: Path, **fields: Any) -> dict[str, Any]:
    """Of a config with other fields: the architecture's, with __ for a dot; without those that are
    None, and without weights but those that every config asks for."""
    raw, _ = random_model(conversion)
    known = metadata(conversion, raw)
    for name, given in fields.items():
        known[f"{conversion.architecture}.{name.replace('__', '.')}"] = given
    tensors = {name: torch.ones(5, 64) for name in ("token_embd.weight", "output.weight", "x")}
    tensors |= {f"layer {layer}": torch.ones(1) for layer in range(64)}
    tensors |= conversion.extra(raw)
    known = {name: given for name, given in known.items() if given is not None}
    return GGUFFiles.read_config(write_gguf(tmp_path / "x.gguf", known, tensors))


def test_the_first_files_of_gemma_2_do_not_name_its_caps(tmp_path):
    missing = {"attn_logit_softcapping": None, "final_logit_softcapping": None}
    config = read_with(CONVERSIONS["gemma2"], tmp_path, **missing, attention__sliding_window=None)
    assert config["attn_logit_softcapping"] == 50.0 and config["final_logit_softcapping"] == 30.0
    assert config["sliding_window"] == 4096


@pytest.mark.parametrize("name, usual", [("gemma3", 6), ("olmo3", 4)])
def test_layers_with_a_window_are_listed_or_counted(name, usual, tmp_path):
    field = "attention__sliding_window_pattern"
    for given, period in ((None, usual), (3, 3), (1, 1)):
        types = read_with(CONVERSIONS[name], tmp_path, **{field: given})["layer_types"]
        whole = [index for index, kind in enumerate(types) if kind == "full_attention"]
        assert whole == list(range(period - 1, len(types), period))
    assert "full_attention" not in read_with(CONVERSIONS[name], tmp_path, **{field: 0})


@pytest.mark.parametrize("name", ["qwen2", "qwen3", "gpt2", "llama"])
def test_attention_to_later_tokens_is_refused(name, tmp_path):
    """Of embedding models that were made of decoders, such as gte-Qwen2."""
    assert read_with(CONVERSIONS[name], tmp_path, attention__causal=True)
    with pytest.raises(UnsupportedModelError, match=r"attention.causal is False"):
        read_with(CONVERSIONS[name], tmp_path, attention__causal=False)


def test_older_files_of_deepseek_do_not_say_how_experts_are_grouped(tmp_path):
    missing = {"expert_group_count": None, "expert_group_used_count": None}
    for name, layers, experts, groups in (
        ("deepseek_v2", 60, 160, (8, 3)),
        ("deepseek_v3", 61, 256, (8, 4)),
        ("deepseek_v3", 61, 384, (1, 1)),  # Kimi K2
        ("deepseek_v2", 27, 64, (1, 1)),  # V2 Lite
    ):
        sizes = {"block_count": layers, "expert_count": experts}
        conversion = CONVERSIONS[name]
        if name == "deepseek_v3":
            biases = {"blk.9.exp_probs_b.bias": torch.ones(experts)}
            conversion = replace(conversion, extra=lambda config, found=biases: found)
        config = read_with(conversion, tmp_path, **missing, **sizes)
        assert (config["n_group"], config["topk_group"]) == groups
        if name == "deepseek_v2":
            assert config["topk_method"] == ("group_limited_greedy" if experts > 64 else "greedy")
        said = read_with(conversion, tmp_path, **sizes, **dict.fromkeys(missing, 2))
        assert (said["n_group"], said["topk_group"]) == (2, 2)


def test_experts_that_are_chosen_otherwise_are_refused(tmp_path):
    assert read_with(CONVERSIONS["glm4-moe"], tmp_path, expert_gating_func=None)
    with pytest.raises(UnsupportedModelError, match=r"expert_gating_func says"):
        read_with(CONVERSIONS["glm4-moe"], tmp_path, expert_gating_func=1)


@pytest.mark.parametrize(
    "fields, factors",
    [
        ({"attention__key_length": 0}, None),
        ({"rope__dimension_count": 0}, None),
        ({"rope__dimension_count": (1 << 31) - 2}, [1.0] * 16),
        ({"attention__key_length": 1 << 31}, [1.0] * 16),
        ({"rope__freq_base": 0.0}, [1.0] * 16),
        ({"rope__freq_base": -2.0}, [1.0] * 16),
        ({"rope__freq_base": float("nan")}, [1.0] * 16),
        ({}, [0.0] * 16),
        ({}, [1.0] * 15 + [float("inf")]),
    ],
)
def test_rotations_that_can_not_be_end_with_a_sentence(fields, factors, tmp_path):
    """And soon."""
    tensors = {} if factors is None else {"rope_freqs.weight": torch.tensor(factors)}
    conversion = replace(CONVERSIONS["llama"], extra=lambda config: tensors)
    if fields == {"attention__key_length": 1 << 31}:
        assert read_with(conversion, tmp_path, **fields)["rope_parameters"]["rope_type"]
        return
    with pytest.raises(CheckpointError, match=r"would rotate|must be above 0"):
        read_with(conversion, tmp_path, **fields)


@pytest.mark.parametrize(
    "name, tensor, shape",
    [
        ("gpt2", "attn_qkv.weight", (1, 64, 192)),
        ("qwen3_5", "ssm_a", (1,)),
        ("qwen3_5", "ssm_a", (64,)),
        ("qwen3_5", "ssm_conv1d.weight", (9, 4)),
    ],
)
def test_a_tensor_that_can_not_be_turned_ends_with_a_sentence(name, tensor, shape, tmp_path):
    raw, model = random_model(CONVERSIONS[name])
    path = convert(CONVERSIONS[name], raw, model, tmp_path / "x.gguf")
    found = GGUFModel(path)
    tensors = {each: torch.ones(found.shape(each)) for each in found.tensors}
    assert GGUFFiles(path) and f"blk.0.{tensor}" in tensors
    tensors[f"blk.0.{tensor}"] = torch.ones(shape)
    write_gguf(path, metadata(CONVERSIONS[name], raw), tensors)
    with pytest.raises(CheckpointError, match=rf"{tensor} has the shape \[{shape[0]}"):
        GGUFFiles(path)


@pytest.mark.parametrize("name", ["gemma4", "nemotron_h", "qwen3_5", "llama"])
def test_a_model_without_layers_is_none(name, tmp_path):
    with pytest.raises(CheckpointError, match=r"would have 0 layers"):
        read_with(CONVERSIONS[name], tmp_path, block_count=0)
