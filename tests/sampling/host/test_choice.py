"""The choice among logits: exact against plain arithmetic, and right on average."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.sampling.host import choice, noise

INF = float("inf")


def make_draw(
    num_rows: int,
    *,
    temperature: float = 1.0,
    min_p: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
) -> choice.Draw:
    """The same options in each row, at positions 0, 1, ..."""
    streams = np.repeat(noise.stream(seed, 0), num_rows)
    return choice.Draw(
        keys=noise.row_keys(streams, np.arange(num_rows)),
        temperature=np.full(num_rows, max(temperature, choice.MIN_TEMPERATURE), np.float32),
        log_min_p=np.full(num_rows, math.log(min_p) if min_p else -INF, np.float32),
        top_k=np.full(num_rows, top_k),
        top_p=np.full(num_rows, top_p),
    )


def sample(line: Any, draw: choice.Draw) -> np.ndarray:
    """Every row of the draw on the same logits."""
    logits = torch.as_tensor(line, dtype=torch.float32).repeat(len(draw.keys), 1)
    return choice.sample(logits, logits.amax(dim=1), draw)


def scaled(line: np.ndarray, temperature: float) -> np.ndarray:
    line = line.astype(np.float32)
    divisor = np.float32(max(temperature, choice.MIN_TEMPERATURE))
    with np.errstate(over="ignore"):
        return ((line - line.max()) / divisor).astype(np.float64)


def left_by_definition(
    line: np.ndarray, temperature: float, min_p: float, top_k: int, top_p: float
) -> np.ndarray:
    """Which tokens the options leave: bool [V], by sorting, token by token."""
    x = scaled(line, temperature)
    weights = np.exp(x)
    left = (x > -INF) & (weights >= min_p)
    if 0 < top_k < len(x):
        left &= x >= np.sort(np.where(left, x, -INF))[::-1][top_k - 1]
    if top_p < 1.0:
        total = weights[left].sum()
        above = np.array([weights[left & (x > value)].sum() for value in x])
        left &= above < top_p * total
    return left


def best_by_definition(line: np.ndarray, left: np.ndarray, temperature: float, key: Any) -> int:
    """argmax over what is left of x + noise; the lowest token id among equals."""
    exact = noise.gumbel(noise.uniforms(key, np.arange(len(line))))
    return int(np.where(left, scaled(line, temperature) + exact, -INF).argmax())


@st.composite
def lines_of_logits(draw: Any) -> np.ndarray:
    """Spread from none to much; often on a grid, so that many are equal; some excluded."""
    rng = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    vocab_size = draw(st.integers(1, 60))
    line = rng.normal(size=vocab_size) * draw(st.sampled_from([0.0, 0.3, 1.0, 5.0, 40.0]))
    grid = draw(st.sampled_from([None, 0.5, 4.0]))
    if grid is not None:
        line = np.round(line / grid) * grid
    num_excluded = min(draw(st.integers(0, 20)), vocab_size - 1)
    line[rng.permutation(vocab_size)[:num_excluded]] = -INF
    return line.astype(np.float32)


@settings(max_examples=200, deadline=None)
@given(
    line=lines_of_logits(),
    seed=st.integers(0, 1 << 30),
    temperature=st.sampled_from([1e-40, 1e-6, 0.1, 0.7, 1.0, 3.0, 100.0]),
    min_p=st.sampled_from([0.0, 0.0, 0.01, 0.3, 1.0]),
    top_k=st.sampled_from([0, 0, 1, 2, 5, 20, 59]),
    top_p=st.sampled_from([1.0, 1.0, 0.999, 0.9, 0.5, 0.1, 1e-9]),
)
def test_equals_the_definition(
    line: np.ndarray, seed: int, temperature: float, min_p: float, top_k: int, top_p: float
) -> None:
    draw = make_draw(6, temperature=temperature, min_p=min_p, top_k=top_k, top_p=top_p, seed=seed)
    left = left_by_definition(line, temperature, min_p, top_k, top_p)
    expected = [best_by_definition(line, left, temperature, key) for key in draw.keys]
    assert sample(line, draw).tolist() == expected


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"top_p": 0.9},
        {"top_p": 0.3},
        {"top_k": 40},
        {"top_k": 40, "top_p": 0.8},
        {"min_p": 0.1},
    ],
)
@pytest.mark.parametrize("spread", [0.0, 1.0, 4.0])
def test_equals_the_definition_over_a_large_vocabulary(
    options: dict[str, Any], spread: float
) -> None:
    rng = np.random.default_rng(11)
    line = (rng.normal(size=5003) * spread).astype(np.float32)
    full: dict[str, Any] = {"temperature": 0.9, "min_p": 0.0, "top_k": 0, "top_p": 1.0} | options
    draw = make_draw(30, seed=5, **full)
    left = left_by_definition(line, **full)
    expected = [best_by_definition(line, left, 0.9, key) for key in draw.keys]
    assert sample(line, draw).tolist() == expected


def test_sampled_rows_do_not_depend_on_the_batch() -> None:
    """With blocks of several rows, and with top_k rows beside others of another k."""
    rng = np.random.default_rng(2)
    num_rows, vocab_size = 70, 4999
    logits = torch.from_numpy(rng.normal(size=(num_rows, vocab_size)).astype(np.float32) * 2)
    draw = choice.Draw(
        keys=rng.integers(0, 1 << 63, num_rows).astype(np.uint64),
        temperature=rng.uniform(0.2, 2.0, num_rows).astype(np.float32),
        log_min_p=np.log(rng.choice([1e-30, 0.02], num_rows)).astype(np.float32),
        top_k=rng.choice([0, 0, 1, 7, 300], num_rows),
        top_p=rng.choice([1.0, 0.95, 0.4], num_rows),
    )
    crowd = choice.sample(logits.clone(), logits.amax(dim=1), draw)
    for row in range(num_rows):
        line = logits[row : row + 1].clone()
        alone = choice.sample(line, line.amax(dim=1), draw.take(np.array([row])))
        assert alone[0] == crowd[row]


def assert_frequencies(token_ids: np.ndarray, probabilities: np.ndarray) -> None:
    """Chi-square over tokens of nonzero probability; the others never come."""
    counts = np.bincount(token_ids, minlength=len(probabilities))
    assert counts[probabilities == 0.0].sum() == 0
    expected = len(token_ids) * probabilities[probabilities > 0.0]
    assert expected.min() > 5.0
    observed = counts[probabilities > 0.0]
    degrees = len(expected) - 1
    spread = 2.0 / (9.0 * max(degrees, 1))
    bound = degrees * (1.0 - spread + 4.0 * math.sqrt(spread)) ** 3
    assert ((observed - expected) ** 2 / expected).sum() <= bound


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 2.0},
        {"top_k": 5},
        {"top_p": 0.8},
        {"top_p": 0.2},
        {"min_p": 0.1},
        {"temperature": 1.5, "min_p": 0.05, "top_k": 12, "top_p": 0.85},
    ],
)
def test_frequencies_are_the_softmax_of_what_is_left(options: dict[str, Any]) -> None:
    rng = np.random.default_rng(8)
    line = rng.normal(size=20).astype(np.float32)
    full: dict[str, Any] = {"temperature": 1.0, "min_p": 0.0, "top_k": 0, "top_p": 1.0} | options
    left = left_by_definition(line, **full)
    weights = np.where(left, np.exp(scaled(line, full["temperature"])), 0.0)
    token_ids = sample(line, make_draw(60_000, seed=77, **full))
    assert_frequencies(token_ids, weights / weights.sum())


def test_frequencies_over_seeds_and_over_branches() -> None:
    line = np.random.default_rng(9).normal(size=12).astype(np.float32)
    weights = np.exp(scaled(line, 1.0))
    position = np.full(10_000, 31)
    for streams in (
        np.array([noise.stream(seed, 0) for seed in range(10_000)]),
        np.array([noise.stream(4, branch) for branch in range(10_000)]),
    ):
        draw = make_draw(10_000)
        keyed = choice.Draw(
            noise.row_keys(streams, position),
            draw.temperature,
            draw.log_min_p,
            draw.top_k,
            draw.top_p,
        )
        assert_frequencies(sample(line, keyed), weights / weights.sum())


def test_successive_tokens_are_independent() -> None:
    token_ids = sample(np.zeros(4, np.float32), make_draw(60_000, seed=3))
    pairs = token_ids[1:] * 4 + token_ids[:-1]
    assert_frequencies(pairs, np.full(16, 1 / 16))


def test_a_tiny_temperature_is_greedy_and_does_not_overflow() -> None:
    line = np.array([3.0, 1e4, 9999.0, -3e38], np.float32)
    for temperature in (1e-3, 1e-10, 1e-30, 1e-45, 5e-324):
        assert set(sample(line, make_draw(50, temperature=temperature))) == {1}


def test_all_that_tie_with_the_kth_are_left() -> None:
    """More ties than fit in what top_k looks at first, so the whole row is raced."""
    line = np.zeros(500, np.float32)
    line[7] = 1.0
    line[400:] = -1.0
    drawn = set(sample(line, make_draw(20_000, top_k=2)).tolist())
    assert drawn == set(range(400))


def test_all_that_tie_with_the_last_of_the_nucleus_are_left() -> None:
    line = np.array([1.0, 1.0, 0.0, 0.0, -1.0], np.float32)
    assert set(sample(line, make_draw(2000, top_p=0.01))) == {0, 1}
    assert set(sample(line, make_draw(2000, top_p=0.75))) == {0, 1, 2, 3}


def test_the_nucleus_ends_where_it_reaches_top_p() -> None:
    line = np.log(np.array([0.5, 0.25, 0.125, 0.0625, 0.0625], np.float32))
    assert set(sample(line, make_draw(500, top_p=0.49))) == {0}
    assert set(sample(line, make_draw(500, top_p=0.51))) == {0, 1}
    assert set(sample(line, make_draw(500, top_p=0.76))) == {0, 1, 2}


def test_top_p_counts_only_what_top_k_and_min_p_left() -> None:
    line = np.log(np.array([0.4, 0.3, 0.2, 0.1], np.float32))
    # Of the two that top_k leaves, the first has 4/7 of the weight.
    assert set(sample(line, make_draw(500, top_k=2, top_p=0.55))) == {0}
    assert set(sample(line, make_draw(500, top_k=2, top_p=0.6))) == {0, 1}
    assert set(sample(line, make_draw(500, min_p=0.7, top_p=0.55))) == {0}
    assert set(sample(line, make_draw(500, min_p=0.7, top_p=0.6))) == {0, 1}


def test_excluded_tokens_never_come() -> None:
    line = np.full(50, -INF, np.float32)
    line[[3, 9]] = 0.0
    for options in ({}, {"top_k": 30}, {"top_p": 0.99}, {"min_p": 1e-9}):
        assert set(sample(line, make_draw(200, **options))) == {3, 9}


def test_first_argmax_takes_the_lowest_index_and_sees_nan() -> None:
    values = torch.tensor([[1.0, 2.0, 2.0], [0.0, 0.0, 0.0], [1.0, float("nan"), 3.0]])
    assert choice.first_argmax(values).tolist() == [1, 0, 1]
