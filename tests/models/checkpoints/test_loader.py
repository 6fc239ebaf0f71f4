"""Filling a model: every tensor used, every parameter filled, in hardly more memory than it has."""

import json
import logging
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from transformers import LlamaConfig as HFLlamaConfig
from transformers import MixtralConfig as HFMixtralConfig
from transformers import Qwen3Config as HFQwen3Config
from transformers import Qwen3NextConfig as HFQwen3NextConfig

from quire.errors import CheckpointError
from quire.formats.dense import DenseMethod
from quire.formats.format_registry import load_weight_format
from quire.kernels.quantize import NUM_WIDE
from quire.layers.sharded import LinearMethods
from quire.models.architectures import MODELS
from quire.models.checkpoints import source
from quire.models.checkpoints.loader import (
    Reading,
    checkpoint_slots,
    load_again,
    load_model,
    weight_bytes,
)
from quire.models.families.llama import LlamaForCausalLM
from quire.models.registry import load_config

CPU = torch.device("cpu")
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
    expected = reference.state_dict()
    slots = checkpoint_slots(model, MODELS.get("Qwen3ForCausalLM").checkpoint_parts)
    assert {name: slot.shape for name, (slot,) in slots.items()} == {
        name: tuple(tensor.shape) for name, tensor in expected.items()
    }
    numbers = torch.cat([parameter.flatten() for parameter in model.parameters()])
    assert numbers.numel() == sum(tensor.numel() for tensor in expected.values())
    for name, (slot,) in slots.items():  # what is read again changes nothing; another would
        slot.load(0, expected[name])
    assert torch.equal(
        torch.cat([parameter.flatten() for parameter in model.parameters()]), numbers
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
    ],
)
def test_a_missing_tensor_is_named(name, save_checkpoint, load, edit_weights):
    folder, _ = save_checkpoint(HFLlamaConfig)
    edit_weights(folder, lambda tensors: tensors.pop(name))
    with pytest.raises(CheckpointError, match=f"the weights lack {name};"):
        load(folder)


def test_a_missing_head_is_called_one(save_checkpoint, load, edit_weights):
    folder, _ = save_checkpoint(HFLlamaConfig)
    edit_weights(folder, lambda tensors: tensors.pop(HEAD))
    with pytest.raises(CheckpointError, match=f"lack {HEAD}, the head .*tie_word_embeddings"):
        load(folder)


FEW_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
"""By default there are 512, which took 10 s."""


@pytest.mark.parametrize(
    ("config", "fields"),
    [(HFLlamaConfig, {}), (HFMixtralConfig, {}), (HFQwen3NextConfig, FEW_EXPERTS)],
)
@pytest.mark.parametrize("is_tied", [False, True])
def test_a_model_saved_without_its_head_has_no_prefix(
    config, fields, is_tied, save_checkpoint, load, edit_weights
):
    """A head may have been added to its files."""
    folder, _ = save_checkpoint(config, tie_word_embeddings=is_tied, **fields)
    expected = load(folder)

    def remove_prefix(tensors):
        for name in list(tensors):
            tensors[name.removeprefix("model.")] = tensors.pop(name)

    edit_weights(folder, remove_prefix)
    found = load(folder)
    for name, parameter in expected.named_parameters():
        assert torch.equal(parameter, found.get_parameter(name)), name


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
    edit_weights(folder, lambda tensors: tensors.update({name: torch.ones(2)}))
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
    assert ("two different tensors" in caplog.text) is differ
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


def _load_with(folder, kernels, quantization, dtype=torch.float32, num_threads=1):
    weight_format = load_weight_format(quantization)
    methods = LinearMethods(weight_format.method(kernels), head=weight_format.head_method(kernels))
    return load_model(
        folder,
        load_config(folder),
        dtype=dtype,
        device=torch.device("cpu"),
        max_model_len=48,
        methods=methods,
        reading=Reading(num_threads),
    )


@pytest.fixture
def small_pieces(monkeypatch):
    """Pieces of a few rows, so that small tensors have many."""
    monkeypatch.setattr(source, "_CHUNK_BYTES", 10_000)


QUANTIZATIONS = {None: 1e-5, "int8": 0.06, "int4": 0.45}
"""How far logits may be from those of the unrounded model, of their standard deviation."""


def _distance(logits, expected):
    return ((logits - expected).square().mean().sqrt() / expected.std()).item()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_torchs_methods_give_nearly_the_models_logits(
    quantization, tied, save_checkpoint, load, run, small_pieces
):
    folder, _ = save_checkpoint(HFQwen3Config, head_dim=16, tie_word_embeddings=tied)
    token_ids = torch.arange(30)
    expected = run(load(folder), token_ids, [30])
    model = _load_with(folder, None, quantization)
    assert _distance(run(model, token_ids, [30]), expected) <= QUANTIZATIONS[quantization]


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_native_methods_give_torchs_logits(
    quantization, tied, num_threads, save_checkpoint, run, small_pieces, kernels
):
    folder, _ = save_checkpoint(
        HFQwen3Config, head_dim=16, attention_bias=True, tie_word_embeddings=tied
    )
    token_ids = torch.arange(30)
    expected = run(_load_with(folder, None, quantization), token_ids, [30])
    model = _load_with(folder, kernels, quantization, num_threads=num_threads)
    # An activation that falls on the other side of a rounding is one part of 127 off.
    assert _distance(run(model, token_ids, [30]), expected) < (5e-3 if quantization else 1e-5)
    is_shared = tied and quantization is None
    assert (model.model.embed_tokens.weight is None) is is_shared


@pytest.mark.parametrize("tied", [False, True])
def test_a_heads_wide_inputs_are_those_of_its_own_rows(tied, save_checkpoint, edit_weights):
    wide = torch.arange(5, 256, 16)[:NUM_WIDE]

    def widen(weights):
        for name in (HEAD, "model.embed_tokens.weight"):
            if name in weights:
                places = wide if tied or name == HEAD else wide - 1
                weights[name][:, places] *= 4

    folder, _ = save_checkpoint(
        HFLlamaConfig, hidden_size=256, max_shard_size="1GB", tie_word_embeddings=tied
    )
    edit_weights(folder, widen)
    found = _load_with(folder, None, "int4").lm_head.get_parameter("wide_inputs")
    assert torch.equal(found, wide.int())


@pytest.mark.parametrize("change", TIED_CHANGES.values(), ids=TIED_CHANGES.keys())
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_tied_ends_are_packed_from_either_name(
    quantization, change, save_checkpoint, run, edit_weights, kernels
):
    folder, _ = save_checkpoint(HFLlamaConfig, tie_word_embeddings=True)
    edit_weights(folder, change)
    token_ids = torch.arange(30)
    model = _load_with(folder, kernels, quantization)
    expected = _logits_of_transformers(folder, token_ids)
    assert _distance(run(model, token_ids, [30]), expected) <= QUANTIZATIONS[quantization]


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_missing_and_unexpected_tensors_are_refused_under_all_methods(
    quantization, save_checkpoint, edit_weights
):
    folder, _ = save_checkpoint(HFLlamaConfig)
    name = "model.layers.1.self_attn.k_proj.weight"
    edit_weights(folder, lambda tensors: tensors.update(extra=tensors.pop(name)))
    with pytest.raises(CheckpointError, match=f"the weights lack {name};"):
        _load_with(folder, None, quantization)


@pytest.mark.parametrize("num_threads", [1, 2])
def test_loading_tells_how_far_it_has_come(num_threads, save_checkpoint, small_pieces):
    folder, _ = save_checkpoint(HFLlamaConfig)
    reported = []
    model = load_model(
        folder,
        load_config(folder),
        dtype=torch.float32,
        device=torch.device("cpu"),
        max_model_len=48,
        reading=Reading(num_threads, lambda done, total: reported.append((done, total))),
    )
    num_weights = sum(parameter.numel() for parameter in model.parameters())
    assert reported[-1] == (num_weights, num_weights)
    assert 2 < len(reported) <= 101
    assert reported == sorted(set(reported)) and {total for _, total in reported} == {num_weights}


@pytest.mark.parametrize("num_threads", [1, 2])
def test_errors_of_loading_threads_are_raised(num_threads, save_checkpoint, edit_weights):
    folder, _ = save_checkpoint(HFLlamaConfig)
    name = "model.layers.1.self_attn.k_proj.weight"
    edit_weights(folder, lambda tensors: tensors.update({name: tensors[name].to(torch.int8)}))
    with pytest.raises(CheckpointError, match=f"{name} is stored as I8"):
        _load_with(folder, None, None, num_threads=num_threads)


@pytest.mark.parametrize("tied", [False, True])
def test_linears_are_filled_again_and_nothing_else(tied, save_checkpoint, small_pieces):
    folder, _ = save_checkpoint(
        HFQwen3Config, head_dim=16, attention_bias=True, tie_word_embeddings=tied
    )
    model = _load_with(folder, None, "int8")
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.zero_()
    names = ["lm_head", "model.layers.1.self_attn.qkv_proj"]
    linears = [model.get_submodule(name) for name in names]
    methods = LinearMethods(load_weight_format("int8").method(None))
    load_again(linears, model, folder, load_config(folder), methods=methods)
    filled = {f"{name}.{leaf}" for name in names for leaf in ("levels", "scales")}
    for name, parameter in model.named_parameters():
        expected = before[name] if name in filled else torch.zeros_like(parameter)
        assert torch.equal(parameter, expected), name


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("quantization", QUANTIZATIONS)
def test_the_size_is_known_before_loading(quantization, tied, save_checkpoint):
    folder, _ = save_checkpoint(HFQwen3Config, head_dim=16, tie_word_embeddings=tied)
    model = _load_with(folder, None, quantization, dtype=torch.bfloat16)
    num_bytes = sum(each.numel() * each.element_size() for each in model.parameters())
    methods = LinearMethods(load_weight_format(quantization).method())
    assert weight_bytes(folder, load_config(folder), torch.bfloat16, methods) == num_bytes


MEASURE = """
from pathlib import Path
import torch
from quire.kernels.cpu.selection import select_kernels
from quire.formats.format_registry import load_weight_format
from quire.layers.sharded import LinearMethods
from quire.models.checkpoints.loader import Reading, load_model, weight_bytes
from quire.models.registry import load_config

def peak_mib():
    with open("/proc/self/status") as status:
        line = next(line for line in status if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024

folder, kernels, dtype = Path(words[0]), words[1], getattr(torch, words[2])
config = load_config(folder)
weight_format = load_weight_format(words[3] if words[3:] else None)
methods = LinearMethods(weight_format.method(select_kernels(kernels, 2, dtype)))
before = peak_mib()
options = {"dtype": dtype, "device": torch.device("cpu"), "max_model_len": 64}
model = load_model(folder, config, methods=methods, reading=Reading(2), **options)
print(weight_bytes(folder, config, dtype, methods) / 2**20, peak_mib() - before)
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


MEMORY_CONFIG = {
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


def _save_zeros(folder, stored, num_shards):
    (folder / "config.json").write_text(json.dumps(MEMORY_CONFIG))
    entry = MODELS.get("LlamaForCausalLM")
    config = entry.config.from_hf(MEMORY_CONFIG)
    model = entry.model(config, dtype=stored, device=torch.device("cpu"), max_model_len=8)
    slots = checkpoint_slots(model, entry.checkpoint_parts)
    assert HEAD not in slots
    zeros = {name: torch.zeros(slot.shape, dtype=stored) for name, (slot,) in slots.items()}
    _save_in_shards(folder, zeros, num_shards)


def _measured_mib(forks, folder, *arguments):
    """(what the model takes, what its loading added to the peak of a process)."""
    status, output = forks.run("-c", f"words = {[str(folder), *arguments]}\n{MEASURE}")
    assert status == 0, output
    model_mib, grown_mib = map(float, output.split())
    return model_mib, grown_mib


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(("stored", "num_shards"), [(torch.float32, 12), (torch.bfloat16, 1)])
def test_loading_takes_hardly_more_memory_than_the_model(stored, num_shards, tmp_path, forks):
    _save_zeros(tmp_path, stored, num_shards)
    model_mib, grown_mib = _measured_mib(forks, tmp_path, "torch", "float32")
    assert model_mib > 270
    assert model_mib - 8 < grown_mib < model_mib + 64, f"{grown_mib=} for {model_mib=}"


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_packing_takes_hardly_more_memory_than_what_is_packed(tmp_path, kernels, forks):
    """Unpacked, a model or its largest tensor would show: 62 MiB in bf16, 125 in fp32."""
    _save_zeros(tmp_path, torch.bfloat16, 1)
    for arguments, smallest_mib in ((["bfloat16"], 134), (["bfloat16", "int8"], 129)):
        model_mib, grown_mib = _measured_mib(forks, tmp_path, kernels.isa, *arguments)
        assert smallest_mib < model_mib < smallest_mib + 4
        assert model_mib - 8 < grown_mib < model_mib + 40, f"{grown_mib=} for {model_mib=}"


@pytest.mark.parametrize("fields", [{"num_hidden_layers": 12}, {"intermediate_size": 1 << 22}])
def test_a_config_is_compared_with_the_weights_before_a_model_of_its_size_is_made(
    fields, save_checkpoint, edit_config, monkeypatch
):
    folder, _ = save_checkpoint(HFLlamaConfig)
    edit_config(folder, **fields)
    devices = []
    build = LlamaForCausalLM.__init__

    def watched(self, config, *, device, **options):
        devices.append((device.type, config.num_layers))
        build(self, config, device=device, **options)

    monkeypatch.setattr(LlamaForCausalLM, "__init__", watched)
    with pytest.raises(CheckpointError, match=r"the weights (lack|have other shapes)"):
        load_model(folder, load_config(folder), dtype=torch.float32, device=CPU, max_model_len=48)
    with pytest.raises(CheckpointError, match=r"the weights (lack|have other shapes)"):
        weight_bytes(folder, load_config(folder), torch.float32, LinearMethods(DenseMethod()))
    assert devices == [("meta", load_config(folder).num_layers)] * 2


def test_layers_that_no_file_could_hold_are_refused_at_once(save_checkpoint, edit_config):
    folder, _ = save_checkpoint(HFLlamaConfig)
    edit_config(folder, num_hidden_layers=4000)
    config = load_config(folder)
    for use in (
        lambda: weight_bytes(folder, config, torch.float32, LinearMethods(DenseMethod())),
        lambda: load_model(folder, config, dtype=torch.float32, device=CPU, max_model_len=16),
    ):
        with pytest.raises(CheckpointError, match=r"are \d+ tensors, but config.json says 4000"):
            use()
