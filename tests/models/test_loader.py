"""Filling a model: every tensor used, every parameter filled, in hardly more memory than it has."""

import json
import logging
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers import LlamaConfig as HFLlamaConfig
from transformers import Qwen3Config as HFQwen3Config

from quire.errors import CheckpointError
from quire.models.loader import checkpoint_targets
from quire.models.registry import MODELS

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@pytest.fixture
def edit_weights():
    """edit(folder, change): change(tensors by name) alters the weights on disk."""

    def edit(folder, change):
        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(
            {name: tensor.contiguous() for name, tensor in tensors.items()},
            folder / "model.safetensors",
        )

    return edit


@pytest.mark.parametrize("max_shard_size", ["1GB", "150KB"])
def test_every_parameter_has_the_checkpoints_numbers(max_shard_size, save_checkpoint, load):
    folder, reference = save_checkpoint(
        HFQwen3Config, head_dim=16, attention_bias=True, max_shard_size=max_shard_size
    )
    model = load(folder)
    targets = checkpoint_targets(model, MODELS["Qwen3ForCausalLM"].checkpoint_parts)
    expected = reference.state_dict()
    assert targets.keys() == expected.keys()
    assert all(torch.equal(targets[name], expected[name]) for name in expected)
    assert sum(target.numel() for target in targets.values()) == sum(
        parameter.numel() for parameter in model.parameters()
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_numbers_are_converted(dtype, save_checkpoint, load):
    folder, reference = save_checkpoint(HFLlamaConfig)
    model = load(folder, dtype=dtype)
    down = reference.model.layers[1].mlp.down_proj.weight
    assert torch.equal(model.model.layers[1].mlp.down_proj.weight, down.to(dtype))


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.1.self_attn.k_proj.weight",
        "model.layers.2.mlp.up_proj.weight",
        "model.norm.weight",
        EMBEDDING,
        HEAD,
    ],
)
def test_a_missing_tensor_is_named(name, save_checkpoint, load, edit_weights):
    folder, _ = save_checkpoint(HFLlamaConfig)
    edit_weights(folder, lambda tensors: tensors.pop(name))
    with pytest.raises(CheckpointError, match=f"the weights lack {name};"):
        load(folder)


def test_many_missing_tensors_are_counted(save_checkpoint, load, edit_config):
    folder, _ = save_checkpoint(HFLlamaConfig)
    edit_config(folder, num_hidden_layers=5)
    with pytest.raises(CheckpointError, match=r"lack model\.layers\.3\..* and 10 more;"):
        load(folder)


@pytest.mark.parametrize(
    "name", ["model.layers.0.self_attn.q_proj.bias", "model.layers.3.mlp.up_proj.weight", "extra"]
)
def test_an_unexpected_tensor_is_named(name, save_checkpoint, load, edit_weights):
    folder, _ = save_checkpoint(HFLlamaConfig)
    edit_weights(folder, lambda tensors: tensors.update({name: torch.zeros(2)}))
    with pytest.raises(CheckpointError, match=f"the weights have {name}, which .* no place for"):
        load(folder)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("model.layers.0.self_attn.v_proj.weight", [32, 64]),
        ("model.layers.0.mlp.gate_proj.weight", [96, 64]),
        ("model.norm.weight", [64]),
    ],
)
def test_a_wrong_shape_is_named(name, shape, save_checkpoint, load, edit_weights):
    folder, _ = save_checkpoint(HFLlamaConfig)
    wrong = [shape[0] + 1, *shape[1:]]
    edit_weights(folder, lambda tensors: tensors.update({name: torch.zeros(wrong)}))
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    assert f"{name} {wrong} instead of {shape}" in str(caught.value)


def test_derived_tensors_of_old_checkpoints_are_ignored(save_checkpoint, load, edit_weights):
    folder, _ = save_checkpoint(HFLlamaConfig)
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit_weights(folder, lambda tensors: tensors.update({name: torch.zeros(8)}))
    load(folder)


def _logits_of_transformers(folder, token_ids):
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.inference_mode():
        return model(token_ids[None]).logits[0]


TIED_CHANGES = {
    "the embedding alone": lambda tensors: None,
    "both alike": lambda tensors: tensors.update({HEAD: tensors[EMBEDDING].clone()}),
    "the head alone": lambda tensors: tensors.update({HEAD: tensors.pop(EMBEDDING)}),
    "two that differ": lambda tensors: tensors.update({HEAD: tensors[EMBEDDING] * 2}),
}


@pytest.mark.parametrize("change", TIED_CHANGES.values(), ids=TIED_CHANGES.keys())
def test_tied_ends_are_read_as_transformers_reads_them(
    change, save_checkpoint, load, run, edit_weights, caplog
):
    folder, _ = save_checkpoint(HFLlamaConfig, tie_word_embeddings=True)
    edit_weights(folder, change)
    token_ids = torch.arange(30)
    with caplog.at_level(logging.WARNING, "quire"):
        model = load(folder)
    differ = change is TIED_CHANGES["two that differ"]
    assert (model.lm_head.weight is model.model.embed_tokens.weight) is not differ
    assert ("two that differ" in caplog.text) is differ
    torch.testing.assert_close(
        run(model, token_ids, [30]),
        _logits_of_transformers(folder, token_ids),
        atol=1e-4,
        rtol=1e-5,
    )


def test_a_tied_model_without_either_end_is_refused(save_checkpoint, load, edit_weights):
    folder, _ = save_checkpoint(HFLlamaConfig, tie_word_embeddings=True)
    edit_weights(folder, lambda tensors: tensors.pop(EMBEDDING))
    with pytest.raises(CheckpointError, match=f"the weights lack {HEAD}"):
        load(folder)


def test_a_corrupt_file_is_named(save_checkpoint, load):
    folder, _ = save_checkpoint(HFLlamaConfig)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is not a whole"):
        load(folder)


MEASURE = """
import sys
from pathlib import Path
import torch
from quire.models.loader import load_model
from quire.models.registry import load_config

def peak_mib():
    with open("/proc/self/status") as status:
        line = next(line for line in status if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024

folder = Path(sys.argv[1])
config = load_config(folder)
before = peak_mib()
model = load_model(
    folder, config, dtype=torch.float32, device=torch.device("cpu"), max_model_len=64
)
model_mib = sum(p.numel() * p.element_size() for p in model.parameters()) / 2**20
print(model_mib, peak_mib() - before)
"""


def _save_in_shards(folder, tensors, num_shards):
    if num_shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return
    names = list(tensors)
    weight_map = {name: f"{index % num_shards}.safetensors" for index, name in enumerate(names)}
    for file in set(weight_map.values()):
        save_file(
            {name: tensors[name] for name in names if weight_map[name] == file}, folder / file
        )
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(("stored", "num_shards"), [(torch.float32, 12), (torch.bfloat16, 1)])
def test_loading_takes_hardly_more_memory_than_the_model(stored, num_shards, tmp_path):
    config = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 32000,
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    entry = MODELS["LlamaForCausalLM"]
    model = entry.model(
        entry.config.from_hf(config), dtype=stored, device=torch.device("cpu"), max_model_len=8
    )
    targets = checkpoint_targets(model, entry.checkpoint_parts)
    del targets[HEAD]
    zeros = {name: torch.zeros(target.shape, dtype=stored) for name, target in targets.items()}
    _save_in_shards(tmp_path, zeros, num_shards)
    output = subprocess.run(
        [sys.executable, "-c", MEASURE, str(tmp_path)], capture_output=True, text=True, check=True
    )
    model_mib, grown_mib = map(float, output.stdout.split())
    assert model_mib > 270
    assert model_mib - 8 < grown_mib < model_mib + 64, f"{grown_mib=} for {model_mib=}"
