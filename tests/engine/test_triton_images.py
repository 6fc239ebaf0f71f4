"""Images by Triton's kernels in the interpreter: the tokens of transformers, whatever the chunks.

A step takes a second here, hence few tokens. Preemptions, hits and forks are tried with the native
kernels (`test_images_law.py`).
"""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.image_prompts import (
    IMAGE_FAMILIES,
    PROMPTS,
    answers_of,
    make_request,
    reference_logits,
)

from quire import LLM

pytest.importorskip("triton")

NEAR_TIE = 1e-3


@pytest.mark.parametrize("name", ["gemma3", "gemma4", "qwen3_vl"])
def test_tokens_equal_transformers(name: str, tmp_path: Path) -> None:
    """Contents that a step computes whole, ids in their place, and features of layers."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("the interpreter is off")
    torch.set_num_threads(1)
    family = IMAGE_FAMILIES[name]
    model = family.save(tmp_path)
    options: dict[str, Any] = {"kernels": "triton", "dtype": "float32", "max_model_len": 96}
    options |= {"max_num_batched_tokens": 20, "max_num_seqs": 4, "num_blocks": 64, "block_size": 8}
    engine = LLM(str(tmp_path), skip_tokenizer_init=True, **options).engine
    parts = PROMPTS["two"]
    answers = answers_of(engine, [make_request(family, "x", parts, max_tokens=2)])
    tokens = [token for token, _ in answers["x", 0]]
    logits = reference_logits(family, model, parts, tokens)
    best, chosen = logits.max(dim=-1).values, logits[range(len(tokens)), tokens]
    assert len(tokens) == 2 and (best - chosen).max() < NEAR_TIE
    assert engine.stats().contents["num_encoded"] == 2
