"""Adapters of an engine by each kind of kernels: the tokens of the model that they are merged into.

A step by Triton's interpreter takes a second, hence few tokens and small layers.
"""

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.adapters.peft_folders import merge, random_pairs, save_peft, sizes_of
from tests.models.family_shapes import make_config
from transformers import AutoModelForCausalLM

from quire.core.adapters import LoRARequest
from quire.core.sampling_params import SamplingParams
from quire.offline.llm import LLM

PROMPTS = [{"prompt_token_ids": list(range(5, 5 + length))} for length in (11, 4, 7)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, logprobs=0)
SIZES: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 32,
    "block_size": 8,
    "num_blocks": 64,
    "max_num_seqs": 4,
    "skip_tokenizer_init": True,
}
LORA: dict[str, Any] = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {"num_hidden_layers": 2},
    # Triton's latent layers need multiples of 8.
    "deepseek_v3, dense": {
        "num_hidden_layers": 1,
        "qk_rope_head_dim": 16,
        "rope_interleave": True,
    },
}
KERNELS = {
    "native": {"kernels": "auto"},
    "torch": {"kernels": "torch"},
    "triton": {"kernels": "triton"},
    "triton, nothing captured": {"kernels": "triton", "enforce_eager": True},
}


@pytest.fixture(scope="module", params=FAMILIES)
def folders(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path, Path]:
    """A model, an adapter of all its linears, and the model with that merged into it."""
    root = tmp_path_factory.mktemp("merged")
    torch.manual_seed(3)
    lengths = {"max_position_embeddings": 64, "initializer_range": 0.15}
    config = make_config(request.param, **lengths, **FAMILIES[request.param])
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(root / "base")
    pairs = random_pairs(sizes_of(model), 6)
    save_peft(root / "adapter", pairs, lora_alpha=9)
    merge(model, pairs, 9 / 6)
    model.save_pretrained(root / "merged")
    return root / "base", root / "adapter", root / "merged"


def generate(folder: Path, adapters: Any = None, **options: Any) -> list[Any]:
    llm = LLM(str(folder), **SIZES, **options)
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False, lora_request=adapters)
    return [output.outputs[0] for output in outputs]


@pytest.fixture(scope="module")
def expected(folders: tuple[Path, Path, Path]) -> Callable[[str], list[Any]]:
    """What the merged model generates by these kernels."""
    return cache(lambda kernels: generate(folders[2], kernels=kernels))


@pytest.mark.parametrize("options", KERNELS.values(), ids=KERNELS.keys())
def test_tokens_are_those_of_the_merged_model(
    folders: tuple[Path, Path, Path],
    expected: Callable[[str], list[Any]],
    options: dict[str, Any],
) -> None:
    """The second row, of the base model, beside two of the adapter: those of an engine without."""
    if options["kernels"] == "triton":
        pytest.importorskip("triton")
        if os.environ.get("TRITON_INTERPRET") != "1":
            pytest.skip("the interpreter is off")
    base, adapter, _ = folders
    request = LoRARequest("merged", 1, str(adapter))

    found = generate(base, [request, None, request], **LORA, **options)

    plain, of_merged = generate(base, **options), expected(options["kernels"])
    for row in (0, 2):
        assert found[row].token_ids == of_merged[row].token_ids
        assert found[row].cumulative_logprob == pytest.approx(
            of_merged[row].cumulative_logprob, abs=1e-3
        )
        assert found[row].token_ids != plain[row].token_ids
    assert found[1].token_ids == plain[1].token_ids
    is_bitwise = options["kernels"] != "torch"  # whose products depend on the batch
    tolerance = 0.0 if is_bitwise else 1e-4
    assert found[1].cumulative_logprob == pytest.approx(plain[1].cumulative_logprob, abs=tolerance)
