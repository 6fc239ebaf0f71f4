"""Block-quantized checkpoints: linears and embeddings keep the codes, and a model computes with
them."""

import logging
from collections.abc import Iterator, Set
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.formats.block_quantized_samples import BLOCK_FORMATS, random_codes
from transformers import LlamaConfig as HFLlamaConfig
from transformers import Qwen3MoeConfig as HFQwen3MoeConfig

from quire.errors import UnsupportedModelError
from quire.formats.block_quantized.linear_methods import BlockQuantizedMethods, PartsMethod
from quire.formats.block_quantized.weights import (
    BlockFormat,
    BlockQuantizedRows,
    UnpackedRows,
)
from quire.formats.dense import DenseMethod
from quire.formats.format_registry import load_weight_format
from quire.formats.weight_format import TritonLinears
from quire.kernels.operators import TORCH_OPERATORS
from quire.layers.linear import Linear
from quire.layers.sharded import LinearMethods
from quire.models.checkpoints.file_formats import CHECKPOINT_SOURCES
from quire.models.checkpoints.loader import Reading, load_model, weight_bytes
from quire.models.checkpoints.safetensors_files import SafetensorsFiles
from quire.models.checkpoints.weights_digest import WeightsDigest
from quire.models.registry import load_config

CPU = torch.device("cpu")
Q4, Q6, Q8 = (BLOCK_FORMATS[name] for name in ("blocks, offsets", "bytes, blocks", "bytes"))
_KINDS = {"q_proj": Q4, "k_proj": Q4, "v_proj": Q6, "o_proj": Q8, "gate_proj": Q4, "up_proj": Q4}
_KINDS |= {"embed_tokens": Q8, "lm_head": Q6}
SHAPE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4}
SHAPE |= {"num_key_value_heads": 2, "head_dim": 64, "vocab_size": 128, "num_hidden_layers": 2}


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256}


def methods_of_a_gpu() -> LinearMethods:
    linears = TritonLinears(TORCH_OPERATORS, batch_invariant=False)
    dense = load_weight_format(None).method(None, linears)
    kept = BlockQuantizedMethods(None, linears)
    return LinearMethods(dense, block_quantized=kept, groups_experts=True)


class BlockQuantizedFiles(SafetensorsFiles):
    """The folder's tensors, of which some are random codes of the same shape."""

    def _codes(self, name: str) -> UnpackedRows:
        block_format = self.block_format(name)
        assert block_format is not None
        return random_codes(block_format, *self.shape(name), seed=sum(name.encode()))

    def block_format(self, name: str) -> BlockFormat | None:
        return _KINDS.get(name.split(".")[-2])

    @contextmanager
    def quantized_rows(self, name: str, span: range) -> Iterator[BlockQuantizedRows]:
        yield self._codes(name).rows(span.start, span.stop)

    @contextmanager
    def rows(self, name: str, span: range) -> Iterator[torch.Tensor]:
        if self.block_format(name) is not None:
            yield self._codes(name).numbers()[span.start : span.stop]
            return
        with super().rows(name, span) as rows:
            yield rows

    @property
    def names(self) -> Set[str]:
        return super().names


@pytest.fixture(params=[False, True], ids=["two ends", "tied"])
def folder(request: pytest.FixtureRequest, save_checkpoint, monkeypatch) -> Path:
    monkeypatch.setattr(CHECKPOINT_SOURCES, "_entries", {"mine": BlockQuantizedFiles})
    return save_checkpoint(HFLlamaConfig, tie_word_embeddings=request.param, **SHAPE)[0]


def load(folder: Path, methods: LinearMethods | None, **options):
    config = load_config(folder)
    return load_model(
        folder,
        config,
        dtype=torch.float32,
        device=CPU,
        max_model_len=64,
        methods=methods,
        **options,
    )


def logits(model, run) -> torch.Tensor:
    return run(model, torch.arange(3, 20), [10, 7])


def test_a_model_of_codes_computes_as_one_of_their_numbers(folder: Path, run) -> None:
    methods = LinearMethods(DenseMethod(), block_quantized=BlockQuantizedMethods())
    digest = WeightsDigest()
    quantized = load(folder, methods, reading=Reading(num_threads=2, digest=digest))
    expected = logits(load(folder, None), run)
    found = logits(quantized, run)
    assert (found - expected).norm() / expected.norm() < 6e-2
    kinds = {
        path.split(".")[-1]: type(module.method).__name__
        for path, module in quantized.named_modules()
        if isinstance(module, Linear)
    }
    assert kinds["qkv_proj"] == "PartsMethod" and kinds["down_proj"] == "DenseMethod"
    assert {kinds[name] for name in ("gate_up_proj", "o_proj", "lm_head")} == {
        "BlockQuantizedTorchMethod"
    }
    assert quantized.model.embed_tokens.weight is None
    again = WeightsDigest()
    load(folder, methods, reading=Reading(digest=again))
    assert again.digest() == digest.digest()


def test_the_memory_plan_counts_codes(folder: Path) -> None:
    config = load_config(folder)
    methods = LinearMethods(DenseMethod(), block_quantized=BlockQuantizedMethods())
    planned = weight_bytes(folder, config, torch.float32, methods)
    model = load(folder, methods)
    dense = sum(parameter.nbytes for parameter in model.parameters())
    kept = [module for module in model.modules() if isinstance(module, Linear)]
    quantized = sum(
        module.method.num_bytes(module.output_size, module.input_size, torch.float32)
        for module in kept
        if not isinstance(module.method, DenseMethod)
    )
    table = model.model.embed_tokens
    if table.method is not None:
        quantized += table.method.num_bytes(128, 256, torch.float32)
    assert planned == dense + quantized
    assert any(isinstance(module.method, PartsMethod) for module in kept)


def test_codes_that_nothing_keeps_become_numbers_and_a_line(
    folder: Path, run, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        model = load(folder, LinearMethods(DenseMethod()))
    assert torch.equal(logits(model, run), logits(load(folder, None), run))
    assert "its Q4_K weights are decoded to float32, as these kernels have no layout" in caplog.text


@pytest.mark.parametrize(
    ("unlike", "is_served"),
    [({"down_proj": Q6}, True), ({"down_proj": Q6, "up_proj": Q6}, False)],
    ids=["down", "up"],
)
def test_experts_are_refused_that_a_gpu_cannot_multiply_at_once(
    unlike: dict[str, BlockFormat],
    is_served: bool,
    save_checkpoint,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(CHECKPOINT_SOURCES, "_entries", {"mine": BlockQuantizedFiles})
    for name, block_format in unlike.items():
        monkeypatch.setitem(_KINDS, name, block_format)
    folder, on_gpu = save_checkpoint(HFQwen3MoeConfig, **SHAPE | EXPERTS)[0], methods_of_a_gpu()
    config = load_config(folder)
    anywhere = weight_bytes(folder, config, torch.float32, replace(on_gpu, groups_experts=False))
    if is_served:
        assert weight_bytes(folder, config, torch.float32, on_gpu) == anywhere
        return
    with pytest.raises(
        UnsupportedModelError, match=r"model\.layers\.0\.mlp\.experts have different"
    ):
        weight_bytes(folder, config, torch.float32, on_gpu)


def test_one_dense_weight_makes_all_experts_dense_on_a_gpu(
    save_checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """down_proj has no codes."""
    pytest.importorskip("triton")
    monkeypatch.setattr(CHECKPOINT_SOURCES, "_entries", {"mine": BlockQuantizedFiles})
    folder = save_checkpoint(HFQwen3MoeConfig, **SHAPE | EXPERTS)[0]
    found = weight_bytes(folder, load_config(folder), torch.float32, methods_of_a_gpu())
    for name in ("gate_proj", "up_proj"):
        monkeypatch.delitem(_KINDS, name)
    assert found == weight_bytes(folder, load_config(folder), torch.float32, methods_of_a_gpu())
