"""Predicted growth: means against the samples they were learned from, peaks against a walk."""

import math
import random
from collections.abc import Callable

import pytest

from quire.core.scheduling.output_length import (
    LONGEST_TOKENS,
    OutputLengthPredictor,
    predicted_peak_blocks,
)

LIMIT = 4096


def learn(lengths: list[int], num_remembered: float = 1e6) -> OutputLengthPredictor:
    predictor = OutputLengthPredictor(num_remembered)
    for length in lengths:
        predictor.observe(length)
    return predictor


def true_remaining(lengths: list[int], num_output_tokens: int, limit: int) -> float:
    longer = [min(length, limit) for length in lengths if length > num_output_tokens]
    return sum(longer) / len(longer) - num_output_tokens


# ---- lengths ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("limit", "share"), [(16, 0.87), (4096, 0.47), (131_072, 0.22)])
def test_before_anything_has_ended_the_limit_says_what_to_expect(limit: int, share: float) -> None:
    remaining = OutputLengthPredictor().expected_remaining(0, limit)
    assert remaining == pytest.approx(share * limit, rel=0.05)


@pytest.mark.parametrize("shape", ["exponential", "lognormal", "two_kinds"])
def test_the_mean_remaining_is_that_of_the_lengths_that_ended(shape: str) -> None:
    draws = random.Random(3)
    draw: dict[str, Callable[[], int]] = {
        "exponential": lambda: 1 + int(draws.expovariate(1 / 338)),
        "lognormal": lambda: 1 + int(draws.lognormvariate(4.5, 1.0)),
        "two_kinds": lambda: draws.choice([draws.randint(10, 30), draws.randint(900, 1100)]),
    }
    lengths = [draw[shape]() for _ in range(20_000)]
    predictor = learn(lengths)
    for num_output_tokens in (0, 5, 50, 200, 500):
        for limit in (600, LIMIT):
            expected = true_remaining(lengths, num_output_tokens, limit)
            got = predictor.expected_remaining(num_output_tokens, limit)
            assert got == pytest.approx(expected, rel=0.05, abs=2)


def test_a_sequence_longer_than_all_before_is_still_expected_to_end() -> None:
    predictor = learn([100] * 1000)
    assert 1 < predictor.expected_remaining(300, LIMIT) < LIMIT - 300
    assert predictor.expected_remaining(LONGEST_TOKENS + 5, 2 * LONGEST_TOKENS) == 1


def test_the_limit_is_never_passed_and_the_end_is_never_now() -> None:
    predictor = learn([1, 2, 3, 1000, LONGEST_TOKENS * 4])
    for limit in (1, 2, 7, 100, 3000):
        for num_output_tokens in range(min(limit, 200)):
            remaining = predictor.expected_remaining(num_output_tokens, limit)
            assert 1 <= remaining <= limit - num_output_tokens
        assert predictor.expected_remaining(limit, limit) == 0
        assert predictor.expected_remaining(limit + 1, limit) == 0


def test_the_past_is_forgotten() -> None:
    predictor = learn([1000] * 2000 + [10] * 500, num_remembered=100)
    assert predictor.expected_remaining(0, LIMIT) < 45  # the prior is 1 in 100, at 1,900 tokens
    remembering = learn([1000] * 2000 + [10] * 500)
    assert remembering.expected_remaining(0, LIMIT) > 700


def test_weights_that_grew_for_long_are_scaled_back_all_together() -> None:
    predictor = learn([1000] * 9300 + [10] * 500, num_remembered=40)  # a unit of e^245 without it
    assert predictor._unit < 1e100
    assert predictor.expected_remaining(0, LIMIT) < 70  # the prior is 1 in 40, at 1,900 tokens
    assert predictor.expected_remaining(0, LIMIT) > 10


# ---- peaks --------------------------------------------------------------------------------------


def walk_to_peak(current: list[tuple[int, int, int]], block_size: int, num_groups: int) -> int:
    """The peak by going through every step: all that are still there, each with its blocks."""
    peak = 0
    for step in range(max((entry[2] for entry in current), default=0) + 1):
        blocks = 0
        for held, num_left, remaining in current:
            if remaining >= step:
                blocks += held + num_groups * math.ceil((step - num_left) / block_size)
        peak = max(peak, blocks)
    return peak


@pytest.mark.parametrize(
    ("current", "peak"),
    [
        ([], 0),
        ([(3, 3, 0)], 3),
        ([(3, 4, 0)], 2),  # an empty block is a reserve
        ([(3, 4, 4)], 3),  # it fits into what it has
        ([(3, 4, 5)], 4),
        ([(1, 0, 8), (9, 0, 1)], 12),  # the large one ends first
        ([(1, 0, 40), (9, 0, 1)], 12),
        ([(1, 0, 80), (9, 0, 1)], 21),  # the long one's end is the peak
        ([(1, 0, 16), (1, 0, 16)], 10),  # they end together
        ([(5, 11, 4)], 4),  # two of its five blocks are reserves, and one of them is needed
    ],
)
def test_peaks_by_hand(current: list[tuple[int, int, int]], peak: int) -> None:
    assert predicted_peak_blocks(current, 4) == peak
    assert walk_to_peak(current, 4, 1) == peak


@pytest.mark.parametrize("num_groups", [1, 3])
def test_the_peak_is_that_of_a_walk_through_every_step(num_groups: int) -> None:
    draws = random.Random(11)
    for _ in range(300):
        block_size = draws.choice([1, 4, 16])
        current = [
            (num_groups * draws.randint(3, 9), draws.randrange(3 * block_size), draws.randrange(60))
            for _ in range(draws.randint(0, 12))
        ]
        expected = walk_to_peak(current, block_size, num_groups)
        assert predicted_peak_blocks(current, block_size, num_groups) == expected
