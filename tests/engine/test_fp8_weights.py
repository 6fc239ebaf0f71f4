"""Checkpoints of fp8 weights, which native and Triton kernels keep: the tokens of their numbers in
fp32, the law to the bit, and the bytes in memory."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.engine.test_quantized_weights import OPTIONS, answers
from tests.models.checkpoints.quantized.test_fp8 import settings
from tests.models.checkpoints.quantized.writers import Writer, fp8, rewrite
from tests.models.family_shapes import make_config
from transformers import AutoModelForCausalLM

from quire import LLM
from quire.formats.block_quantized.linear_methods import BlockQuantizedMethods
from quire.formats.packed import PackedMethod
from quire.kernels.cpu.library import NativeKernels, NativeLibrary
from quire.layers.sharded import LinearMethods
from quire.models.checkpoints.loader import weight_bytes
from quire.models.registry import load_config

LAYOUTS: dict[str, tuple[Writer, list[int] | None]] = {
    "block": (fp8((32, 32)), [32, 32]),
    "output": (fp8((1, 0), "weight_scale"), None),
    "tensor": (fp8((0, 0), "weight_scale", shape=[]), None),
}


def save(folder: Path, writer: Writer, block: list[int] | None, family: str = "llama") -> None:
    """Save a checkpoint of fp8 weights in `folder`/quantized, its numbers in `folder`/numbers."""
    torch.manual_seed(3)
    config = make_config(family, max_position_embeddings=64, initializer_range=0.15)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder / "quantized")
    rewrite(folder / "quantized", model, {"": writer}, settings(weight_block_size=block))
    model.save_pretrained(folder / "numbers")


def prompts() -> list[list[int]]:
    rng = random.Random(2)
    return [[rng.randrange(3, 96) for _ in range(rng.randrange(2, 40))] for _ in range(7)]


def make_llm(folder: Path, **options: Any) -> LLM:
    return LLM(str(folder), **(OPTIONS | options))


@pytest.mark.parametrize(
    ("layout", "kernels"), [*((layout, "auto") for layout in LAYOUTS), ("block", "triton")]
)
def test_tokens_are_those_of_the_numbers_in_fp32(layout: str, kernels: str, tmp_path: Path) -> None:
    if kernels == "triton":
        pytest.importorskip("triton")
    save(tmp_path, *LAYOUTS[layout])
    given = prompts()[: 2 if kernels == "triton" else None]  # interpreted, which takes long
    found = answers(make_llm(tmp_path / "quantized", dtype="float32", kernels=kernels), given)
    expected = answers(make_llm(tmp_path / "numbers", dtype="float32"), given)
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
    for (_, ours), (_, theirs) in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-3)


def test_linears_take_half_the_bytes_of_bf16(native_library: NativeLibrary, tmp_path: Path) -> None:
    save(tmp_path, *LAYOUTS["block"])
    kernels = NativeKernels(native_library, num_threads=1)
    methods = LinearMethods(PackedMethod(kernels), block_quantized=BlockQuantizedMethods(kernels))
    numbers, quantized = (
        weight_bytes(tmp_path / name, load_config(tmp_path / name), torch.bfloat16, methods)
        for name in ("numbers", "quantized")
    )
    tensors = load_file(tmp_path / "quantized" / "model.safetensors")
    num_weights = sum(each.numel() for each in tensors.values() if each.itemsize == 1)
    assert numbers - quantized == num_weights - num_weights // 32 * 4  # a scale has four bytes


@pytest.mark.parametrize("layout", LAYOUTS)
def test_output_does_not_depend_on_the_batch(layout: str, tmp_path: Path) -> None:
    save(tmp_path, *LAYOUTS[layout])
    llm = make_llm(tmp_path / "quantized", dtype="bfloat16")
    crowd = answers(llm, prompts())
    assert len({tokens for tokens, _ in crowd}) > 3
    assert [answers(llm, [prompt])[0] for prompt in prompts()] == crowd
    options = {"max_num_batched_tokens": 16, "num_threads": 1, "enable_prefix_caching": True}
    chunked = make_llm(tmp_path / "quantized", dtype="bfloat16", **options)
    assert answers(chunked, prompts()) == crowd
    assert answers(chunked, prompts()) == crowd  # from the cache
