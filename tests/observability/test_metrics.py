"""Counters grow, gauges follow, histograms add up, and a name belongs to one metric."""

from math import inf, isclose

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.errors import ConfigurationError
from quire.observability.metrics import LATENCY_BUCKETS_S, Histogram, Registry


def test_a_snapshot_holds_every_metric_by_name() -> None:
    registry = Registry()
    steps = registry.counter("steps_total", "steps run")
    blocks = registry.gauge("blocks_used", "KV blocks held")
    ttft = registry.histogram("ttft_s", "time to first token", (0.1, 1.0))
    steps.inc()
    steps.inc(2)
    blocks.set(9)
    blocks.set(4)
    ttft.observe(0.5)
    assert registry.snapshot() == {
        "steps_total": 3,
        "blocks_used": 4,
        "ttft_s": {"count": 1, "total": 0.5, "bounds": [0.1, 1.0, inf], "num_below": [0, 1, 1]},
    }
    assert registry.help_text("blocks_used") == "KV blocks held"


def test_a_snapshot_does_not_follow_later_changes() -> None:
    registry = Registry()
    ttft = registry.histogram("ttft_s", "time to first token")
    before = registry.snapshot()
    ttft.observe(0.2)
    assert before["ttft_s"] != registry.snapshot()["ttft_s"]


def test_a_name_is_taken_once_whatever_the_kind() -> None:
    registry = Registry()
    registry.counter("steps", "steps run")
    with pytest.raises(ConfigurationError, match="'steps' already"):
        registry.gauge("steps", "something else")
    assert registry.snapshot() == {"steps": 0}


def test_a_counter_never_shrinks() -> None:
    counter = Registry().counter("steps_total", "steps run")
    with pytest.raises(AssertionError, match="can't shrink"):
        counter.inc(-1)
    assert counter.value == 0


@pytest.mark.parametrize("bounds", [(), (1.0, 1.0), (2.0, 1.0)])
def test_bounds_must_ascend(bounds: tuple[float, ...]) -> None:
    with pytest.raises(ConfigurationError, match="must ascend"):
        Registry().histogram("ttft_s", "time to first token", bounds)


@pytest.mark.parametrize(
    ("value", "expected"), [(0.5, [1, 1, 1]), (1.0, [1, 1, 1]), (2.0, [0, 1, 1]), (9.0, [0, 0, 1])]
)
def test_a_value_on_a_bound_belongs_below_it(value: float, expected: list[int]) -> None:
    histogram = Histogram((1.0, 2.0))
    histogram.observe(value)
    assert histogram.snapshot()["num_below"] == expected


@given(st.lists(st.floats(0, 100, allow_nan=False)))
def test_buckets_agree_with_counting_by_hand(values: list[float]) -> None:
    histogram = Histogram(LATENCY_BUCKETS_S)
    for value in values:
        histogram.observe(value)
    snapshot = histogram.snapshot()
    assert snapshot["count"] == len(values)
    assert isclose(snapshot["total"], sum(values), abs_tol=1e-6)
    for bound, num_below in zip(snapshot["bounds"], snapshot["num_below"], strict=True):
        assert num_below == sum(value <= bound for value in values)
