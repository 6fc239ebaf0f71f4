"""Inputs that are not rounded: which, that answers come closer, and the same at each start."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.assembly.format_checks.test_compensated_rounding import (
    CPU,
    MODEL_LEN,
    linears,
    log_probabilities,
)
from tests.distributed.ranks import run_ranks
from tests.engine.test_host_experts import save_mxfp4
from tests.models.checkpoints.quantized.test_gptq import gptq, settings
from tests.models.checkpoints.quantized.writers import rewrite_folder
from tests.models.family_shapes import save_wide
from tests.outlier_model import FEW, make_massive_channels
from tests.quantized_copies import folder_copy

from quire.assembly.format_checks.wide_inputs import split_wide_inputs
from quire.attention.kv_rounding import divergence
from quire.distributed.group import ProcessGroup
from quire.formats.block_quantized import native_method
from quire.formats.block_quantized.linear_methods import BlockQuantizedMethods
from quire.formats.dense import DenseMethod
from quire.formats.packed import is_packed, packed
from quire.kernels.cpu.library import NativeKernels, NativeLibrary
from quire.kernels.quantize import widest_activations
from quire.layers.sharded import LinearMethods, Sharding
from quire.models.checkpoints.loader import load_model, weight_bytes
from quire.models.checkpoints.weights_digest import WeightsDigest
from quire.models.interface import CausalLM
from quire.models.registry import load_config


@pytest.fixture(scope="module")
def kernels(native_library: NativeLibrary) -> NativeKernels:
    return NativeKernels(native_library, num_threads=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model with a few massive channels, and linears of GPTQ."""
    made = tmp_path_factory.mktemp("models")
    massive = make_massive_channels(made / "massive", 32)
    return folder_copy(massive, made / "gptq", "GPTQ, groups of 64")


def load(
    folder: Path,
    block_quantized: BlockQuantizedMethods | None,
    group: ProcessGroup | None = None,
) -> CausalLM:
    """A model as `load_model` returns it; without methods for codes, weights become numbers."""
    config = load_config(folder)
    methods = LinearMethods(DenseMethod(), block_quantized=block_quantized)
    if group is not None:
        methods = replace(methods, sharding=Sharding(group, config.vocab_size))
    model = load_model(
        folder, config, dtype=torch.float32, device=CPU, max_model_len=MODEL_LEN, methods=methods
    )
    assert isinstance(model, CausalLM)
    return model


def chosen(model: CausalLM) -> dict[str, list[int]]:
    """The wide inputs of the linears that have some, by path."""
    found = {path: each for path, each in linears(model).items() if is_packed(each)}
    inputs = {path: packed(each)._wide_inputs.tolist() for path, each in found.items()}
    return {path: each for path, each in inputs.items() if each}


def test_widest_inputs_are_those_with_the_largest_shares_of_rows() -> None:
    x = torch.ones(5, 6)
    x[0, 1] = 1000.0  # most of one row
    x[:, 4] = -3.0
    x[:, 2] = 2.0
    assert widest_activations(x, 3).tolist() == [1, 2, 4]
    assert widest_activations(x, 1).tolist() == [4]
    x[1] = 0.0
    x[2:] = torch.nan
    assert widest_activations(x, 1).tolist() == [1]


def test_each_start_splits_the_same_inputs_with_any_threads(
    folder: Path, kernels: NativeKernels, native_library: NativeLibrary
) -> None:
    results, digests = [], []
    for each in (kernels, NativeKernels(native_library, num_threads=2)):
        model, digest = load(folder, BlockQuantizedMethods(each)), WeightsDigest()
        plain = log_probabilities(model)
        split_wide_inputs(model, MODEL_LEN, digest)
        digests.append(digest.digest())
        results.append(log_probabilities(model))
        assert not torch.equal(results[-1], plain)
    assert torch.equal(*results)
    assert digests[0] == digests[1] != WeightsDigest().digest()
    # All linears that are quantized, and no others: the vocabulary projection is dense.
    leaves = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
    found = {f"model.layers.{layer}.{leaf}" for layer in range(4) for leaf in leaves}
    assert chosen(model).keys() == found
    down = chosen(model)["model.layers.1.mlp.down_proj"]
    assert len(down) == 640 // 128 and set(FEW) < set(down)


def test_distributions_come_closer(folder: Path, kernels: NativeKernels) -> None:
    exact = log_probabilities(load(folder, None))
    model = load(folder, BlockQuantizedMethods(kernels))
    plain = divergence(exact, log_probabilities(model)).mean()
    split_wide_inputs(model, MODEL_LEN)
    assert 0 < divergence(exact, log_probabilities(model)).mean() < 0.5 * plain


def test_models_that_cannot_run_the_prompt_round_all_inputs(
    folder: Path, kernels: NativeKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(folder, BlockQuantizedMethods(kernels))
    monkeypatch.setattr(model, "recurrent_specs", (object(),))
    split_wide_inputs(model, MODEL_LEN)
    assert not chosen(model)


@pytest.mark.parametrize("family", ["llama", "deepseek_v3, dense", "lfm2", "gpt-oss"])
def test_the_memory_of_wide_inputs_is_known_before_loading(
    family: str, tmp_path: Path, kernels: NativeKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    if family == "gpt-oss":
        save_mxfp4(tmp_path)
    else:
        save_wide(family, tmp_path)
        rewrite_folder(tmp_path, {"": gptq(size=32)}, settings(group_size=32))
    methods = LinearMethods(DenseMethod(), block_quantized=BlockQuantizedMethods(kernels))
    counted = []
    for inputs_per_wide in (16, 10_000):
        monkeypatch.setattr(native_method, "_INPUTS_PER_WIDE", inputs_per_wide)
        counted.append(weight_bytes(tmp_path, load_config(tmp_path), torch.float32, methods))
    monkeypatch.setattr(native_method, "_INPUTS_PER_WIDE", 16)
    model = load(tmp_path, BlockQuantizedMethods(kernels))
    split_wide_inputs(model, MODEL_LEN)
    wide = [packed(linears(model)[path]) for path in chosen(model)]
    assert bool(wide) == (family not in ("lfm2", "gpt-oss"))  # recurrent layers, only experts
    num_bytes = sum(each._scales.nbytes + each._wide_inputs.nbytes for each in wide)
    assert counted[0] - counted[1] == num_bytes


def test_torch_rounds_all_inputs(folder: Path) -> None:
    model = load(folder, BlockQuantizedMethods())
    plain = log_probabilities(model)
    split_wide_inputs(model, MODEL_LEN)
    assert torch.equal(log_probabilities(model), plain)


def test_each_rank_splits_its_share(folder: Path, kernels: NativeKernels) -> None:
    def compute(group: ProcessGroup) -> tuple[torch.Tensor, dict[str, list[int]]]:
        own = NativeKernels(kernels.library, num_threads=1)
        model = load(folder, BlockQuantizedMethods(own), group)
        split_wide_inputs(model, MODEL_LEN)
        return log_probabilities(model), chosen(model)

    (first, of_first), (second, of_second) = run_ranks(2, compute)
    assert torch.equal(first, second)
    whole = "model.layers.1.mlp.gate_up_proj"
    assert of_first[whole] == of_second[whole]
    assert len(of_first["model.layers.1.mlp.down_proj"]) == 320 // 128
