"""Families with states, latents or experts over two ranks: the tokens of one rank in fp32."""

from pathlib import Path
from typing import Any

import pytest
from tests.engine.test_tensor_parallel import find_beams, generate, logprobs, make_llm, tokens
from tests.models.family_shapes import save_wide

OPTIONS: dict[str, Any] = {"max_num_batched_tokens": 72, "block_size": 8}


@pytest.mark.parametrize(
    "family", ["deepseek_v3", "falcon_h1", "lfm2", "nemotron_h", "qwen3_next", "qwen3_5"]
)
def test_two_ranks_find_the_tokens_of_one(family: str, tmp_path: Path) -> None:
    save_wide(family, tmp_path)
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
