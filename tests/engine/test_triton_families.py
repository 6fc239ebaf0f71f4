"""Families with states or latents by Triton's kernels in the interpreter: the tokens of torch.

A step takes a second here, hence few tokens and small layers. What may happen to memory is tried
with the native kernels.
"""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models.family_shapes import make_config
from transformers import AutoModelForCausalLM

from quire.core.sampling_params import SamplingParams
from quire.offline.llm import LLM

pytest.importorskip("triton")

PROMPTS = [{"prompt_token_ids": list(range(5, 5 + length))} for length in (11, 4)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=0)

SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "delta rule and gated attention": ("qwen3_5", {}),
    "Mamba-2 beside attention": ("falcon_h1", {"num_hidden_layers": 1}),
    "gated convolutions beside attention": ("lfm2", {}),
    # Triton's latent layers need multiples of 8.
    "latents": ("deepseek_v3, dense", {"qk_rope_head_dim": 16, "rope_interleave": True}),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_triton_finds_the_same_tokens(shape: Any, tmp_path: Path) -> None:
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("the interpreter is off")
    name, changes = shape
    torch.manual_seed(3)
    lengths = {"max_position_embeddings": 64, "initializer_range": 0.15}
    config = make_config(name, **lengths, **changes)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)

    def generate(**options: Any) -> list[Any]:
        sizes = {"dtype": "float32", "max_model_len": 32, "block_size": 8, "num_blocks": 64}
        llm = LLM(str(tmp_path), skip_tokenizer_init=True, **sizes, **options)
        outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        return [output.outputs[0] for output in outputs]

    for found, expected in zip(generate(kernels="triton"), generate(kernels="torch"), strict=True):
        assert found.token_ids == expected.token_ids
        assert found.cumulative_logprob == pytest.approx(expected.cumulative_logprob, abs=1e-3)
