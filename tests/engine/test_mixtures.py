"""Mixtures of experts in an engine: they run natively as a whole, and ranks share them."""

from pathlib import Path

import pytest
import torch
from tests.models.family_shapes import make_config
from transformers import AutoModelForCausalLM

from quire.core.sampling_params import SamplingParams
from quire.errors import ConfigurationError
from quire.formats.int4 import TritonInt4Method
from quire.models.architectures import MODELS
from quire.models.config import DecoderConfig
from quire.models.registry import load_config
from quire.offline.llm import LLM

NATIVE = ["gemma4-moe", "glm4-moe", "gpt-oss", "granite-moe", "mixtral", "olmoe", "qwen3-moe"]
"""Families with experts, as `tests.models.family_shapes` names them."""

GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
PROMPTS = [{"prompt_token_ids": list(range(3 + length, 3 + 2 * length))} for length in (1, 9, 30)]


def save(name: str, folder: Path, **sizes: object) -> Path:
    torch.manual_seed(1)
    config = make_config(name, eos_token_id=1, pad_token_id=0, bos_token_id=None, **sizes)
    model = AutoModelForCausalLM.from_config(config)
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.15)
    model.save_pretrained(folder)
    return folder


def make_llm(folder: Path, **options: object) -> LLM:
    return LLM(str(folder), skip_tokenizer_init=True, max_model_len=64, **options)


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
@pytest.mark.parametrize("name", NATIVE)
def test_a_step_is_one_native_program(name: str, quantization: str | None, tmp_path: Path) -> None:
    folder = save(name, tmp_path)
    config = load_config(folder)
    assert isinstance(config, DecoderConfig) and config.mixtures is not None
    assert config.architecture in MODELS
    llm = make_llm(folder, dtype="bfloat16", quantization=quantization)
    assert type(llm.engine._runner._forward).__name__ == "NativeForward"


@pytest.mark.usefixtures("forked_ranks")
@pytest.mark.parametrize("kernels", ["auto", "torch"])
def test_two_ranks_have_the_tokens_of_one(kernels: str, tmp_path: Path) -> None:
    folder = save("gpt-oss", tmp_path)
    options = {"dtype": "float32", "kernels": kernels}
    alone, shared = (
        make_llm(folder, tensor_parallel_size=num_ranks, **options) for num_ranks in (1, 2)
    )
    expected, found = (llm.generate(PROMPTS, GREEDY, use_tqdm=False) for llm in (alone, shared))
    assert [each.outputs[0].token_ids for each in found] == [
        each.outputs[0].token_ids for each in expected
    ]


@pytest.mark.parametrize(
    ("name", "quantization"),
    [("gpt-oss", None), ("qwen3-moe", "int8"), ("gpt-oss", "int4")],
)
def test_triton_kernels_give_the_tokens_of_torch(
    name: str, quantization: str | None, tmp_path: Path
) -> None:
    pytest.importorskip("triton")
    torch.set_num_threads(1)
    folder = save(name, tmp_path, num_hidden_layers=2)
    # Rounded products take the interpreter five times as long.
    prompts, num_tokens = (PROMPTS, 4) if quantization is None else (PROMPTS[:2], 2)
    params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    found, expected = (
        make_llm(
            folder,
            dtype="float32",
            quantization=quantization,
            kernels=kernels,
            num_blocks=20,
            max_num_seqs=4,
        ).generate(prompts, params, use_tqdm=False)
        for kernels in ("triton", "torch")
    )
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.outputs[0].token_ids == theirs.outputs[0].token_ids


def test_a_format_without_grouped_products_is_refused_on_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    folder = save("qwen3-moe", tmp_path)
    monkeypatch.setattr(TritonInt4Method, "groups_experts", False)
    with pytest.raises(ConfigurationError, match="quantization is 'int4', but on a GPU this"):
        make_llm(folder, kernels="triton", quantization="int4")
