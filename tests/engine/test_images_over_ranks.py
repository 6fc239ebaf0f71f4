"""Images over two ranks, of which the first encodes: the tokens of one rank in fp32."""

from pathlib import Path

import pytest
import torch
from tests.engine.crowding import preempt_much
from tests.engine.image_prompts import IMAGE_FAMILIES, answers_of, requests_of

from quire import LLM

OPTIONS = {
    "dtype": "float32",
    "max_model_len": 96,
    "skip_tokenizer_init": True,
    "block_size": 8,
    "max_num_batched_tokens": 13,
    "max_num_seqs": 12,
}


@pytest.mark.parametrize("name", ["mistral3", "qwen3_vl"])
def test_two_ranks_find_the_tokens_of_one(name: str, tmp_path: Path) -> None:
    """In chunks, forked and preempted, then from the prefix cache. Rows of patches of the one
    family end with tokens of text; the other has features for several layers."""
    torch.set_num_threads(1)
    family = IMAGE_FAMILIES[name]
    family.save(tmp_path)
    found = []
    for num_ranks in (1, 2):
        llm = LLM(str(tmp_path), tensor_parallel_size=num_ranks, **OPTIONS)
        preempt_much(llm)
        answers = [answers_of(llm.engine, requests_of(family, n=2)) for _ in range(2)]
        tokens = [
            {key: [token for token, _ in entries] for key, entries in each.items()}
            for each in answers
        ]
        assert tokens[0] == tokens[1]
        found.append(tokens[0])
        assert llm.engine.stats().contents["num_encoded"] == 2
        assert llm.engine.stats().num_held_blocks == 0
    assert found[0] == found[1]
