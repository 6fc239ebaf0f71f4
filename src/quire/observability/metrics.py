"""Counters, gauges and histograms in plain Python.

A metric is made once, at set-up, and then updated without a look-up. Each registry belongs to one
process and is written by one thread; `snapshot` may be called from that thread at any time. Knows
no export format: whoever publishes the numbers turns `snapshot()` into one.
"""

from bisect import bisect_left
from collections.abc import Sequence
from math import inf
from typing import TypedDict, TypeVar

from quire.errors import ConfigurationError

LATENCY_BUCKETS_S = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0,
)  # fmt: skip


class HistogramSnapshot(TypedDict):
    """num_below[i] counts the observations of at most bounds[i]; the last bound is infinity."""

    count: int
    total: float
    bounds: list[float]
    num_below: list[int]


Snapshot = dict[str, float | HistogramSnapshot]


class Counter:
    """A number that only grows."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def inc(self, amount: float = 1) -> None:
        """Add `amount`, which is 0 or more."""
        assert amount >= 0, f"a counter can't shrink (by {amount})"
        self.value += amount


class Gauge:
    """A number as it is now."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def set(self, value: float) -> None:
        """Replace the number."""
        self.value = value


class Histogram:
    """How observations spread over buckets. `bounds` ascend; one bucket above the last is implied.

    Invariant: the bucket counts add up to `count`.
    """

    __slots__ = ("_buckets", "bounds", "count", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        if not bounds or list(bounds) != sorted(set(bounds)):
            raise ConfigurationError(
                f"histogram bounds are {list(bounds)}, but must ascend, and there must be one"
            )
        self.bounds = tuple(bounds)
        self.count = 0
        self.total = 0.0
        self._buckets = [0] * (len(bounds) + 1)

    def observe(self, value: float) -> None:
        """Count one observation; one equal to a bound belongs below it."""
        self._buckets[bisect_left(self.bounds, value)] += 1
        self.count += 1
        self.total += value

    def snapshot(self) -> HistogramSnapshot:
        """The counts so far, cumulative as the field's tools want them."""
        num_below, below = [], 0
        for bucket in self._buckets:
            below += bucket
            num_below.append(below)
        return HistogramSnapshot(
            count=self.count, total=self.total, bounds=[*self.bounds, inf], num_below=num_below
        )


M = TypeVar("M", Counter, Gauge, Histogram)


class Registry:
    """The metrics of one process. Invariant: a name belongs to one metric and has a help text."""

    def __init__(self) -> None:
        self._metrics: dict[str, Counter | Gauge | Histogram] = {}
        self._help: dict[str, str] = {}

    def counter(self, name: str, help_text: str) -> Counter:
        """A new counter; by custom its name ends in `_total`."""
        return self._add(name, help_text, Counter())

    def gauge(self, name: str, help_text: str) -> Gauge:
        """A new gauge."""
        return self._add(name, help_text, Gauge())

    def histogram(
        self, name: str, help_text: str, bounds: Sequence[float] = LATENCY_BUCKETS_S
    ) -> Histogram:
        """A new histogram; by custom its name ends in the unit."""
        return self._add(name, help_text, Histogram(bounds))

    def snapshot(self) -> Snapshot:
        """Every metric by name: a number, or a HistogramSnapshot."""
        return {
            name: metric.snapshot() if isinstance(metric, Histogram) else metric.value
            for name, metric in self._metrics.items()
        }

    def help_text(self, name: str) -> str:
        """What a metric counts. Raises KeyError for an unknown name."""
        return self._help[name]

    def _add(self, name: str, help_text: str, metric: M) -> M:
        if name in self._metrics:
            raise ConfigurationError(f"there is a metric {name!r} already; share it or rename one")
        self._metrics[name] = metric
        self._help[name] = help_text
        return metric
