"""Checkpoints in their published form, under the names of transformers' classes."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.errors import CheckpointError, UnsupportedModelError
from quire.models.checkpoints.loader import load_model
from quire.models.registry import find_entry, load_config


def opened(folder):
    config = load_config(folder, from_transformers=True)
    return find_entry(config).open(folder, config)


def read(checkpoint, name):
    """All rows of a tensor, piece by piece."""
    pieces = []
    for span in checkpoint.pieces(name):
        with checkpoint.rows(name, span) as rows:
            pieces.append(rows.clone())
    return torch.cat(pieces)


@pytest.mark.parametrize("model_type", ["mixtral", "apertus", "jais2", "gpt2"])
def test_converted_tensors_equal_those_of_the_hf_class(model_type, tiny_folder):
    folder, reference = tiny_folder(model_type)
    checkpoint = opened(folder)
    wanted = reference.state_dict()
    assert checkpoint.names == wanted.keys()
    for name, tensor in wanted.items():
        assert checkpoint.shape(name) == tuple(tensor.shape), name
        assert torch.equal(read(checkpoint, name), torch.atleast_1d(tensor)), name


def test_names_without_the_prefix_of_the_head_are_understood(tiny_folder):
    folder, reference = tiny_folder("gpt2")
    path = folder / "model.safetensors"
    tensors = {
        name.removeprefix("transformer."): tensor for name, tensor in load_file(path).items()
    }
    save_file(tensors, path, {"format": "pt"})
    checkpoint = opened(folder)
    assert checkpoint.names == reference.state_dict().keys()


def test_a_missing_expert_is_named(tiny_folder):
    folder, _ = tiny_folder("mixtral")
    path = folder / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.1.block_sparse_moe.experts.3.w1.weight"]
    save_file(tensors, path, {"format": "pt"})
    config = load_config(folder, from_transformers=True)
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.experts\.gate_up_proj"):
        load_model(
            folder, config, dtype=torch.float32, device=torch.device("cpu"), max_model_len=64
        )


def test_the_choice_of_the_model_is_the_callers(tiny_folder):
    folder, _ = tiny_folder("llama")
    own, other = load_config(folder), load_config(folder, from_transformers=True)
    assert find_entry(own).model is not find_entry(other).model
    assert own.attention_specs == other.attention_specs
    assert json.loads((folder / "config.json").read_text())["architectures"] == [own.architecture]


def test_a_refusal_says_whether_quire_has_a_model_of_its_own(tmp_path):
    path = tmp_path / "config.json"
    for name, kind, message in (
        ("Qwen3NextForCausalLM", "qwen3_next", "quire has a model of its own for it, which"),
        ("MambaForCausalLM", "mamba", "quire has no model of its own for it"),
    ):
        path.write_text(json.dumps({"architectures": [name], "model_type": kind}))
        with pytest.raises(UnsupportedModelError, match=f"a state beside keys.*; {message}"):
            load_config(tmp_path, from_transformers=True)
    path.write_text("{}")
    with pytest.raises(
        UnsupportedModelError, match=r"architectures names no class.*of its own for it"
    ):
        load_config(tmp_path, from_transformers=True)
