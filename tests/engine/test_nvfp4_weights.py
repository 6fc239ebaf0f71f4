"""Checkpoints of NVFP4 weights: the tokens of their numbers in fp32, the law to the bit, and the
tokens of torch's arithmetic by Triton's kernels."""

from pathlib import Path

import pytest
import torch
from tests.engine.test_fp8_weights import make_llm, prompts
from tests.engine.test_quantized_weights import answers
from tests.models.checkpoints.quantized.test_nvfp4 import MODELOPT, OF_MODELOPT
from tests.models.checkpoints.quantized.writers import rewrite
from tests.models.family_shapes import make_config
from transformers import AutoModelForCausalLM

from quire import SamplingParams


def save(folder: Path, family: str, linears: str = "", **sizes: int) -> None:
    """Save a checkpoint of NVFP4 weights in `folder`/quantized, its numbers in `folder`/numbers."""
    torch.manual_seed(3)
    config = make_config(family, max_position_embeddings=64, initializer_range=0.15, **sizes)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder / "quantized")
    rewrite(folder / "quantized", model, {linears: OF_MODELOPT}, MODELOPT)
    model.save_pretrained(folder / "numbers")


@pytest.mark.usefixtures("native_library")
@pytest.mark.parametrize(("family", "linears"), [("llama", ""), ("qwen3-moe", "_proj")])
def test_tokens_are_those_of_the_numbers_in_fp32(family: str, linears: str, tmp_path: Path) -> None:
    save(tmp_path, family, linears)
    expected = answers(make_llm(tmp_path / "numbers", dtype="float32"), prompts())
    found = answers(make_llm(tmp_path / "quantized", dtype="float32"), prompts())
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
    for (_, ours), (_, theirs) in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-3)


@pytest.mark.usefixtures("native_library")
def test_output_does_not_depend_on_the_batch(tmp_path: Path) -> None:
    save(tmp_path, "llama")
    llm = make_llm(tmp_path / "quantized", dtype="bfloat16")
    crowd = answers(llm, prompts())
    assert len({tokens for tokens, _ in crowd}) > 3
    assert [answers(llm, [prompt])[0] for prompt in prompts()] == crowd
    options = {"max_num_batched_tokens": 16, "num_threads": 1, "enable_prefix_caching": True}
    chunked = make_llm(tmp_path / "quantized", dtype="bfloat16", **options)
    assert answers(chunked, prompts()) == crowd
    assert answers(chunked, prompts()) == crowd  # from the cache


def test_triton_kernels_give_the_token_of_torch(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    torch.set_num_threads(1)
    save(tmp_path, "llama", num_hidden_layers=1)
    options = {"dtype": "float32", "max_num_seqs": 1, "max_num_batched_tokens": 16}
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=1)
    params.detokenize = False
    found, expected = (
        make_llm(tmp_path / "quantized", kernels=kernels, **options)
        .generate([{"prompt_token_ids": [5, 9, 3]}], params, use_tqdm=False)[0]
        .outputs[0]
        for kernels in ("triton", "torch")
    )
    assert found.token_ids == expected.token_ids
    assert found.cumulative_logprob == pytest.approx(expected.cumulative_logprob, abs=1e-4)
