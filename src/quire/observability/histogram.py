"""A histogram of durations with fixed buckets.

Adding a value is cheap, and sums are exact. All durations that quire reports use the same buckets,
so histograms of several servers, or from before and after a restart, can be summed by bucket.
Filled by `engine.engine` and `server.telemetry.monitor`.
"""

from bisect import bisect_left
from typing import Any

DURATION_BOUNDS_S = (
    *(0.0001, 0.0002, 0.0005),
    *(0.001, 0.002, 0.003, 0.005, 0.007),
    *(0.01, 0.015, 0.02, 0.03, 0.05, 0.07),
    *(0.1, 0.15, 0.2, 0.3, 0.5, 0.7),
    *(1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0),
)
"""Bounds from 0.1 ms to ten minutes, finer from 1 ms to 1 s, where inter-token latencies lie."""


class Histogram:
    """Counts of values by bucket, and the sum of the values."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...] = DURATION_BOUNDS_S) -> None:
        assert bounds and list(bounds) == sorted(set(bounds)), bounds
        self.bounds = bounds
        #: Counts by bucket. The values in a bucket are at most its bound and above the previous
        #: bound. The last bucket has the values above all bounds.
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, num_times: int = 1) -> None:
        """Add a value, or the same value several times."""
        self.counts[bisect_left(self.bounds, value)] += num_times
        self.total += value * num_times

    def as_dict(self) -> dict[str, Any]:
        """The histogram as plain data for msgpack and JSON."""
        return {"bounds": list(self.bounds), "counts": list(self.counts), "sum": self.total}
