"""Adapters of linears whose weights are a file's codes: log-probabilities are as near those of the
merged numbers as they are without an adapter, and a request has the same bits in any company.
"""

import os
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.adapters.peft_folders import merge, random_pairs, save_peft, sizes_of
from tests.gguf_writer import SCALE_BYTES, TYPE_IDS, Raw, write_gguf
from tests.models.checkpoints.gguf.test_gguf_files import (
    HEADS,
    KV_HEADS,
    METADATA,
    H,
    decoded,
    ends,
    layer,
)
from tests.models.checkpoints.quantized import test_awq as awq
from tests.models.checkpoints.quantized import test_fp8 as fp8
from tests.models.checkpoints.quantized import test_gptq as gptq
from tests.models.checkpoints.quantized.writers import mixed_up, rewrite
from tests.models.family_shapes import make_config
from transformers import AutoModelForCausalLM

from quire import LLM, LoRARequest, SamplingParams
from quire.hub.gguf.storage_types import STORAGE_TYPES

OPTIONS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "enable_prefix_caching": False,
    "kv_cache_memory": "4MiB",
    "max_model_len": 64,
    "max_num_seqs": 8,
}
LORA: dict[str, Any] = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 6}
V = 96


@dataclass
class Files:
    """The model of codes, that of its numbers, and that of its numbers with the adapter's."""

    quantized: str
    numbers: str
    merged: str
    adapters: list[LoRARequest]


def _adapters(root: Path, sizes: dict[str, tuple[int, int]]) -> tuple[list[LoRARequest], Any]:
    found = []
    for seed in range(2):
        pairs = random_pairs(sizes, 6, seed)
        path = save_peft(root / f"a{seed}", pairs, lora_alpha=9)
        found.append((LoRARequest(f"a{seed}", seed + 1, str(path)), pairs))
    return [request for request, _ in found], found[0][1]


GGUF_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

LINEARS = {f"blk.0.{name}.weight" for name in GGUF_NAMES}


def permuted(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """As llama.cpp's converter does it with q and k."""
    pairs = weight.reshape(num_heads, 2, len(weight) // num_heads // 2, weight.shape[1])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def smaller(raw: Raw) -> Raw:
    """With factors of 2^-13 and not 2^-8: scales of K types go to 63 or 127, and an adapter's
    numbers would be nothing beside such weights."""
    storage = STORAGE_TYPES[TYPE_IDS[raw.kind]]
    blocks = np.frombuffer(raw.content, np.uint8).reshape(-1, storage.block_bytes).copy()
    if storage.block_size == 256:
        for at in SCALE_BYTES[raw.kind]:
            blocks[:, at] -= 5 << 2
    return Raw(blocks.tobytes(), raw.kind, raw.shape)


def gguf(kind: str, other: str) -> Callable[[Path], Files]:
    def write(root: Path) -> Files:
        tensors = layer(kind, other) | ends("Q8_0")
        layers = {name: smaller(each) for name, each in tensors.items() if name in LINEARS}
        norms = torch.Generator().manual_seed(3)
        tensors |= layers | {
            "blk.0.attn_norm.weight": torch.rand(H, generator=norms),
            "blk.0.ffn_norm.weight": torch.rand(H, generator=norms),
            "output_norm.weight": torch.full((H,), 0.02),  # so that logits lie near each other
        }
        numbers = {
            name: decoded(each) if isinstance(each, Raw) else each for name, each in tensors.items()
        }
        layer_path = "model.layers.0"
        sizes = {
            f"{layer_path}.{ours}": tuple(numbers[f"blk.0.{theirs}.weight"].shape[::-1])
            for theirs, ours in GGUF_NAMES.items()
        }
        adapters, pairs = _adapters(root, sizes)
        merged = dict(numbers)
        for theirs, ours in GGUF_NAMES.items():
            a, b = pairs[f"{layer_path}.{ours}"]
            delta = 1.5 * (b @ a)
            if theirs in ("attn_q", "attn_k"):
                delta = permuted(delta, HEADS if theirs == "attn_q" else KV_HEADS)
            merged[f"blk.0.{theirs}.weight"] = numbers[f"blk.0.{theirs}.weight"] + delta
        return Files(
            str(write_gguf(root / "quantized.gguf", METADATA, tensors)),
            str(write_gguf(root / "numbers.gguf", METADATA, numbers)),
            str(write_gguf(root / "merged.gguf", METADATA, merged)),
            adapters,
        )

    return write


def safetensors(settings: dict[str, object], writers: dict[str, Any]) -> Callable[[Path], Files]:
    def write(root: Path) -> Files:
        torch.manual_seed(3)
        config = make_config("llama", max_position_embeddings=64, initializer_range=0.15)
        model = AutoModelForCausalLM.from_config(config)
        model.save_pretrained(root / "quantized")
        rewrite(root / "quantized", model, writers, settings)
        model.save_pretrained(root / "numbers")
        adapters, pairs = _adapters(root, sizes_of(model))
        merge(model, pairs, 1.5)
        model.save_pretrained(root / "merged")
        return Files(str(root / "quantized"), str(root / "numbers"), str(root / "merged"), adapters)

    return write


KINDS = {
    "GGUF Q4_K, v of Q6_K": gguf("Q4_K", "Q6_K"),
    "GGUF Q8_0": gguf("Q8_0", "Q8_0"),
    "GGUF Q4_0, v of Q8_0": gguf("Q4_0", "Q8_0"),
    "GGUF MXFP4, v of IQ4_XS": gguf("MXFP4", "IQ4_XS"),
    "AWQ": safetensors(awq.settings(), {"": awq.awq()}),
    "AWQ, v of numbers": safetensors(
        awq.settings(modules_to_not_convert=["lm_head", "v_proj"]),
        {each: awq.awq() for each in ("q_", "k_", "o_", "gate_", "up_", "down_")},
    ),
    "GPTQ": safetensors(gptq.settings(), {"": gptq.gptq()}),
    "GPTQ, act-order": safetensors(gptq.settings(desc_act=True), {"": gptq.gptq(order=mixed_up)}),
    "fp8": safetensors(fp8.settings(weight_block_size=[32, 32]), {"": fp8.fp8((32, 32))}),
}


@pytest.fixture(scope="module", params=KINDS.values(), ids=KINDS.keys())
def files(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Files:
    return request.param(tmp_path_factory.mktemp("quantized"))


def prompt_logprobs(
    folder: str,
    adapter: LoRARequest | None = None,
    lengths: tuple[int, ...] = (40, 1, 23),
    **options: Any,
) -> torch.Tensor:
    """Of what random prompts say, [sum of their lengths]."""
    llm = LLM(folder, dtype="float32", **(OPTIONS | options))
    wish = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    rng = random.Random(1)
    ids = [[rng.randrange(3, V) for _ in range(length)] for length in lengths]
    outputs = llm.generate(
        [{"prompt_token_ids": each} for each in ids], wish, False, lora_request=adapter
    )
    return torch.tensor(
        [
            entries[token].logprob
            for output, prompt in zip(outputs, ids, strict=True)
            for token, entries in zip(prompt, output.prompt_logprobs, strict=True)
            if entries is not None
        ]
    )


@pytest.mark.parametrize("kernels", [{}, {"kernels": "torch"}], ids=["native", "torch"])
def test_adapters_on_quantized_weights_are_as_exact_as_the_base_model(
    files: Files, kernels
) -> None:
    """By medians: here and there rounded activations turn a random model's attention."""
    plain = prompt_logprobs(files.numbers, **kernels)
    near = (prompt_logprobs(files.quantized, **kernels) - plain).abs().median()
    adapted = prompt_logprobs(files.quantized, files.adapters[0], **LORA, **kernels)
    merged = prompt_logprobs(files.merged, **kernels)
    distance = (adapted - merged).abs().median()
    assert distance < max(3 * near, 1e-4)
    assert (merged - plain).abs().median() > 10 * distance


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_output_does_not_depend_on_the_batch(files: Files, dtype: str) -> None:
    wish = SamplingParams(temperature=0.9, seed=5, max_tokens=8, ignore_eos=True, logprobs=1)
    wish.detokenize = False
    rng = random.Random(2)
    prompts = [[rng.randrange(3, V) for _ in range(rng.randrange(2, 40))] for _ in range(9)]
    chosen = [[*files.adapters, None][number % 3] for number in range(9)]

    def answers(llm: LLM, numbers: Any, with_adapters: bool = True) -> list[Any]:
        given = [{"prompt_token_ids": prompts[number]} for number in numbers]
        adapters = [chosen[number] for number in numbers] if with_adapters else None
        found = llm.generate(given, wish, False, lora_request=adapters)
        return [(each.outputs[0].token_ids, each.outputs[0].cumulative_logprob) for each in found]

    llm = LLM(files.quantized, dtype=dtype, **OPTIONS, **LORA)
    crowd = answers(llm, range(9))
    assert [answers(llm, [number])[0] for number in range(4)] == crowd[:4]
    other = {"max_num_batched_tokens": 16, "num_threads": 1}
    assert answers(LLM(files.quantized, dtype=dtype, **other, **OPTIONS, **LORA), range(9)) == crowd
    plain = LLM(files.quantized, dtype=dtype, **OPTIONS)
    assert answers(plain, (2, 5, 8), with_adapters=False) == [crowd[row] for row in (2, 5, 8)]


@pytest.mark.parametrize("kind", ["GPTQ, act-order", "AWQ, v of numbers"])
def test_triton_computes_the_same(kind: str, tmp_path: Path) -> None:
    """A step by Triton's interpreter takes a second, hence few tokens."""
    pytest.importorskip("triton")
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("the interpreter is off")
    files = KINDS[kind](tmp_path)
    lengths, sizes = (7, 2), {"max_num_batched_tokens": 32, "max_num_seqs": 2}
    found = [
        prompt_logprobs(files.quantized, files.adapters[0], lengths, **LORA, **sizes, **kernels)
        for kernels in ({"kernels": "triton"}, {})
    ]
    torch.testing.assert_close(*found, atol=1e-4, rtol=1e-4)
