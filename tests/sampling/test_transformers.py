"""The options mean what they mean in transformers: its processors and warpers as the reference.

What is left by its warpers, with our noise on top, must have our token as its best.
"""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from quire.core.sampling_params import DecodingParams
from quire.sampling.host import noise

V = 40
NUM_POSITIONS = 5


def ours_and_theirs(
    make_batch: Any, warpers: list[Any], salt: int, **options: Any
) -> tuple[list[int], list[int]]:
    """Tokens of several sequences of other lengths on the same logits, by both."""
    rng = np.random.default_rng(salt)
    line = (rng.normal(size=V) * 2.5).astype(np.float32)
    params = DecodingParams(max_tokens=9, seed=salt, **options)
    outputs = [rng.integers(0, V, length).tolist() for length in range(NUM_POSITIONS)]
    batch = make_batch(V, [(params, [2, 3], output) for output in outputs])
    ours = batch.sample(np.tile(line, (NUM_POSITIONS, 1))).token_ids.tolist()
    theirs = []
    for output in outputs:
        input_ids = torch.tensor([[2, 3, *output]])
        scores = LogitsProcessorList(warpers)(input_ids, torch.from_numpy(line.copy())[None])
        score = scores[0].numpy().astype(np.float64)
        if params.temperature > 0.0:
            stream = np.array([noise.stream(salt, 0)])
            key = noise.row_keys(stream, np.array([input_ids.shape[1]]))
            score += noise.gumbel(noise.uniforms(key, np.arange(V)))
        theirs.append(int(score.argmax()))
    return ours, theirs


@settings(max_examples=60, deadline=None)
@given(
    salt=st.integers(0, 1 << 30),
    temperature=st.floats(0.05, 5.0),
    min_p=st.floats(0.001, 0.9),
    top_k=st.integers(1, V - 1),
    top_p=st.floats(0.01, 0.999),
    used=st.sets(st.sampled_from(["min_p", "top_k", "top_p"])),
)
def test_warpers(
    make_batch: Any,
    salt: int,
    temperature: float,
    min_p: float,
    top_k: int,
    top_p: float,
    used: set[str],
) -> None:
    warpers: list[Any] = [TemperatureLogitsWarper(temperature)]
    options: dict[str, Any] = {}
    for name, value, warper in (
        ("min_p", min_p, MinPLogitsWarper),
        ("top_k", top_k, TopKLogitsWarper),
        ("top_p", top_p, TopPLogitsWarper),
    ):
        if name in used:
            options[name] = value
            warpers.append(warper(value))
    ours, theirs = ours_and_theirs(make_batch, warpers, salt, temperature=temperature, **options)
    assert ours == theirs


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("penalty", [0.5, 1.0001, 1.2, 5.0])
def test_repetition_penalty(make_batch: Any, penalty: float, temperature: float) -> None:
    for salt in range(20):
        ours, theirs = ours_and_theirs(
            make_batch,
            [RepetitionPenaltyLogitsProcessor(penalty)],
            salt,
            temperature=temperature,
            repetition_penalty=penalty,
        )
        assert ours == theirs


def test_min_tokens(make_batch: Any) -> None:
    ends = list(range(0, V, 2))
    for salt in range(20):
        ours, theirs = ours_and_theirs(
            make_batch,
            [MinNewTokensLengthLogitsProcessor(2, 3, ends)],
            salt,
            temperature=0.0,
            min_tokens=3,
            end_token_ids=tuple(ends),
        )
        assert ours == theirs


def test_bad_words(make_batch: Any) -> None:
    """The prompt, [2, 3], is no part of these words: transformers counts it, we do not."""
    for salt in range(20):
        rng = np.random.default_rng(salt)
        words = [[token] for token in rng.permutation(np.arange(4, V))[:20].tolist()]
        words += [[a, b] for a in range(4, V) for b in rng.integers(4, V, 10).tolist()]
        ours, theirs = ours_and_theirs(
            make_batch,
            [NoBadWordsLogitsProcessor(words)],
            salt,
            temperature=0.0,
            bad_words=tuple(tuple(word) for word in words),
        )
        assert ours == theirs
