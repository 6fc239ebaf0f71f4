"""Each value in its bucket, the sum beside them, as plain data."""

import bisect
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.observability.histogram import DURATION_BOUNDS_S, Histogram

BOUNDS = (0.5, 1.0, 5.0)


@pytest.mark.parametrize(
    ("value", "bucket"), [(0.0, 0), (0.5, 0), (0.6, 1), (1.0, 1), (5.0, 2), (5.1, 3), (1e9, 3)]
)
def test_a_bound_belongs_to_the_bucket_that_it_ends(value: float, bucket: int) -> None:
    histogram = Histogram(BOUNDS)
    histogram.observe(value)
    assert histogram.counts == [int(index == bucket) for index in range(4)]
    assert histogram.total == value


@given(st.lists(st.tuples(st.floats(0, 1e4), st.integers(1, 5))))
def test_every_value_is_counted_as_often_as_it_came(values: list[tuple[float, int]]) -> None:
    histogram = Histogram()
    for value, num_times in values:
        histogram.observe(value, num_times)
    flat = [value for value, num_times in values for _ in range(num_times)]
    assert sum(histogram.counts) == len(flat)
    assert histogram.total == pytest.approx(sum(flat))
    for index, bound in enumerate(DURATION_BOUNDS_S):
        assert sum(histogram.counts[: index + 1]) == bisect.bisect_right(sorted(flat), bound)


def test_durations_are_told_from_a_tenth_of_a_millisecond_to_minutes() -> None:
    assert DURATION_BOUNDS_S[0] == 1e-4
    assert DURATION_BOUNDS_S[-1] >= 300
    steps = itertools.pairwise(DURATION_BOUNDS_S)
    assert all(1 < after / before <= 2.51 for before, after in steps)


def test_it_is_told_as_plain_data_of_its_own() -> None:
    histogram = Histogram(BOUNDS)
    histogram.observe(2.0, 3)
    reported = histogram.as_dict()
    assert reported == {"bounds": [0.5, 1.0, 5.0], "counts": [0, 0, 3, 0], "sum": 6.0}
    histogram.observe(2.0)
    assert reported["counts"] == [0, 0, 3, 0]


@pytest.mark.parametrize("bounds", [(), (2.0, 1.0), (1.0, 1.0)])
def test_invalid_histogram_bounds_raise_assertion_error(bounds: tuple[float, ...]) -> None:
    with pytest.raises(AssertionError):
        Histogram(bounds)
