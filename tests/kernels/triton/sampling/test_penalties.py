"""Counts of tokens and penalties by kernels, to the bit those of `sampling.penalties`."""

from collections import Counter

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from quire.kernels.triton.sampling import penalties


def int32(values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_counts_of_prompt_and_output() -> None:
    """The second row is counted in two parts, over more positions than one program takes."""
    rng = np.random.default_rng(0)
    vocab_size, num_prompt = 40, [0, 700]
    tokens = rng.integers(0, vocab_size - 3, (2, 2500))
    table = torch.zeros((3, vocab_size), dtype=torch.int32)
    for spans in ([[0, 2, 0, 9, 0], [1, 0, 0, 1900, 700]], [[1, 0, 1900, 2500, 700]]):
        longest = max(end - start for _, _, start, end, _ in spans)
        penalties.count_tokens(table, torch.tensor(spans), int32(tokens), longest)
    for row, slot, length in ((0, 2, 9), (1, 0, 2500)):
        generated = Counter(tokens[row, num_prompt[row] : length].tolist())
        seen = set(tokens[row, :length].tolist())
        expected = [2 * generated[token] + (token in seen) for token in range(vocab_size)]
        assert table[slot].tolist() == expected
    assert table[1].tolist() == [0] * vocab_size


def test_tokens_beyond_the_vocabulary_are_not_counted() -> None:
    table = torch.zeros((2, 4), dtype=torch.int32)
    penalties.count_tokens(table, torch.tensor([[0, 0, 0, 3, 0]]), int32([[1, 4, -1]]), 3)
    assert table.tolist() == [[0, 3, 0, 0], [0, 0, 0, 0]]


@pytest.mark.parametrize("vocab_size", [7, 1100])
def test_penalties_round_each_step(vocab_size: int) -> None:
    rng = np.random.default_rng(vocab_size)
    logits = rng.normal(size=(3, vocab_size)).astype(np.float32) * 5
    logits[0, 2] = -np.inf
    table = rng.integers(0, 2, (2, vocab_size)) * rng.integers(0, 9, (2, vocab_size))
    factors = np.array([[1.1, 0.3, -0.7], [0.7, -1.9, 2.0]], np.float32)
    places = [(2, 0), (0, 1)]
    expected = logits.copy()
    for (line, slot), (repetition, frequency, presence) in zip(places, factors, strict=True):
        for token in np.flatnonzero(table[slot]):
            count, value = np.float32(table[slot, token] >> 1), expected[line, token]
            value = value / repetition if value > 0 else value * repetition
            value = value - frequency * count
            expected[line, token] = value - presence * np.float32(count > 0)
    found = torch.from_numpy(logits)
    penalties.penalize(found, int32(table.tolist()), int32(places), torch.from_numpy(factors))
    assert np.array_equal(found.numpy(), expected)
