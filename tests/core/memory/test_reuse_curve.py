"""The life table of contents, against counts done by hand."""

from itertools import pairwise

import pytest

from quire.core.memory.eviction import (
    HALF_LIFE,
    MAX_AGE,
    NUM_BINS,
    PRIOR,
    PRIOR_WEIGHT,
    ReuseCurve,
    bin_of,
)


@pytest.mark.parametrize(
    ("age", "expected"),
    [(0, 0), (1, 1), (2, 2), (3, 2), (4, 3), (127, 7), (128, 8), (MAX_AGE, 8), (10**9, 8)],
)
def test_bins_are_octaves_and_the_last_is_open(age: int, expected: int) -> None:
    assert bin_of(age) == expected < NUM_BINS


def density(parts: list[float], first: int) -> float:
    """The best hits per epoch over bins first..last, from the definition: one content at a time."""
    best = 0.0
    for last in range(first, len(parts)):
        hits = epochs = 0.0
        left = 1.0
        for index in range(first, last + 1):
            width = max(1, 2 ** (index - 1))
            hits += left * parts[index]
            epochs += left * (parts[index] * width / 2 + (1 - parts[index]) * width)
            left *= 1 - parts[index]
        best = max(best, hits / epochs)
    return best


def expected_densities(reached: list[float], used: list[float], prior: float) -> list[float]:
    parts = [
        (hits + prior * PRIOR_WEIGHT) / (all_ + PRIOR_WEIGHT)
        for hits, all_ in zip(used, reached, strict=True)
    ]
    return [density(parts, first) for first in range(NUM_BINS)]


def test_before_anything_is_seen_younger_and_reused_contents_are_worth_more() -> None:
    once, again = ReuseCurve().densities()
    assert once == pytest.approx(expected_densities([0] * NUM_BINS, [0] * NUM_BINS, PRIOR[0]))
    assert again == pytest.approx(expected_densities([0] * NUM_BINS, [0] * NUM_BINS, PRIOR[1]))
    for values in (once, again):
        assert all(young >= old for young, old in pairwise(values))
        assert values[1] > 50 * values[-1]
    assert all(low < high for low, high in zip(once, again, strict=True))


def test_samples_are_counted_in_each_bin_that_they_reach_and_reuse_in_its_own() -> None:
    curve = ReuseCurve()
    for _ in range(10):
        curve.start(0)
    curve.reused(0, 0)
    curve.next_epoch()  # nine reach bin 1, of an age of one epoch
    curve.start(0)
    for _ in range(3):
        curve.reused(0, 0)
    curve.next_epoch()  # six and the one reach bins 2 and 1
    curve.next_epoch()  # the one reaches bin 2
    curve.reused(0, 0)
    curve.reused(0, 1)
    reached = [11.0, 10.0, 7.0, 0, 0, 0, 0, 0, 0]
    used = [1.0, 3.0, 2.0, 0, 0, 0, 0, 0, 0]
    assert curve.densities()[0] == pytest.approx(expected_densities(reached, used, PRIOR[0]))
    assert curve.densities()[1] == ReuseCurve().densities()[1]  # the other class saw nothing


def test_a_reuse_that_comes_late_makes_those_worth_more_that_have_waited() -> None:
    curve = ReuseCurve()
    for _ in range(400):
        curve.start(0)
        if curve.epoch >= 8:
            curve.reused(0, curve.epoch - 8)  # always after eight epochs: bin 4
        curve.next_epoch()
    once, _ = curve.densities()
    assert once[0] < once[1] < once[2] < once[3] < once[4]
    assert once[5] < once[0] / 10


def test_what_was_seen_long_ago_counts_half() -> None:
    curve = ReuseCurve()
    for _ in range(64):
        curve.start(1)
        curve.reused(1, 0)
    for _ in range(HALF_LIFE):
        curve.next_epoch()
    reached = [32.0] + [0.0] * (NUM_BINS - 1)
    expected = expected_densities(reached, reached, PRIOR[1])
    assert curve.densities()[1] == pytest.approx(expected)


def test_samples_of_every_age_up_to_the_greatest_can_be_reused() -> None:
    curve = ReuseCurve()
    curve.start(0)
    for _ in range(MAX_AGE):
        curve.next_epoch()
    before = curve.densities()[0][-1]
    curve.reused(0, 0)
    assert curve.densities()[0][-1] > before
