"""Families with states, latents or experts over two ranks: the tokens of one rank in fp32."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.test_tensor_parallel import find_beams, generate, logprobs, make_llm, tokens
from tests.models.family_shapes import make_config
from transformers import AutoModelForCausalLM

OPTIONS: dict[str, Any] = {"max_num_batched_tokens": 72, "block_size": 8}


@pytest.mark.parametrize(
    "family", ["deepseek_v3", "falcon_h1", "nemotron_h", "qwen3_next", "qwen3_5"]
)
def test_two_ranks_find_the_tokens_of_one(family: str, tmp_path: Path) -> None:
    torch.manual_seed(len(family))
    lengths = {"max_position_embeddings": 256, "bos_token_id": None, "eos_token_id": 1}
    model = AutoModelForCausalLM.from_config(make_config(family, **lengths, pad_token_id=0))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Wide, so that logits lie apart.
            parameter.normal_(0, 0.15)
            if "norm" in name:
                parameter += 1
    model.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 1}))
    one = make_llm(tmp_path, 1, **OPTIONS)
    two = make_llm(tmp_path, 2, **OPTIONS)
    expected, found = generate(one), generate(two)
    assert tokens(found) == tokens(expected)
    assert find_beams(two) == find_beams(one)
    near = [value for value in logprobs(expected) if value is not None]
    assert [value for value in logprobs(found) if value is not None] == pytest.approx(
        near, abs=2e-3
    )
    for index in range(5):
        alone = generate(two, index, index + 1)
        assert tokens(alone) == tokens(found[index : index + 1])
    assert two.engine.stats().num_held_blocks == 0
    assert two.engine.stats().num_failed_steps == 0
