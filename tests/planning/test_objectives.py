"""Bounds on waits: as text, and how far a configuration is from them."""

import math

import pytest

from quire.errors import ConfigurationError
from quire.planning.objectives import Objectives, excess, parse_objectives, quantile


@pytest.mark.parametrize(
    ("text", "ttft_s", "itl_s"),
    [
        ("ttft=0.5,itl=50ms", 0.5, 0.05),
        ("itl=2s", None, 2.0),
        ("ttft=250ms", 0.25, None),
    ],
)
def test_times_have_units(text: str, ttft_s: float | None, itl_s: float | None) -> None:
    found = parse_objectives(text)
    assert (found.ttft_s, found.itl_s) == (pytest.approx(ttft_s), pytest.approx(itl_s))


@pytest.mark.parametrize("text", ["", "ttft", "ttft=0", "ttft=1,ttft=2", "tpot=1", "itl=-1ms"])
def test_invalid_objectives_are_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match=r"slo has .*, but must be ttft=TIME, itl=TIME"):
        parse_objectives(text)


def test_the_tightest_bound_counts() -> None:
    bounds = Objectives(1.0, 0.1)
    assert excess(bounds, 0.5, 0.2) == 2
    assert excess(bounds, 3.0, 0.2) == 3
    assert excess(bounds, 0.5, math.nan) == 0.5
    assert excess(Objectives(), 99.0, 99.0) == 0


def test_a_quantile_is_one_of_the_values() -> None:
    assert quantile([3.0, 1.0, 2.0], 0.5) == 2
    assert quantile(list(map(float, range(100))), 0.99) == 98
    assert math.isnan(quantile([], 0.5))
