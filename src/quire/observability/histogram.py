"""A histogram of durations in fixed buckets that can be summed.

Cheap to add to, small to send, exact to add up. Every duration that quire reports has the same
bounds, so that histograms of several servers, or of one before and after a restart, can be summed
bucket by bucket. Knows neither clocks nor the format in which it is reported. Filled by
`engine.engine` and `server.monitor`.
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
"""From 0.1 ms to ten minutes; finer from 1 ms to 1 s, where the pauses between tokens lie."""


class Histogram:
    """Counts of values by bucket, and their sum.

    counts: one for each bound (values up to and including it, above the one before) and a last one
    for all values above the last bound. Invariant: `num_values` is their sum.
    """

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...] = DURATION_BOUNDS_S) -> None:
        assert bounds and list(bounds) == sorted(set(bounds)), bounds
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    @property
    def num_values(self) -> int:
        return sum(self.counts)

    def observe(self, value: float, num_times: int = 1) -> None:
        """Add a value, or the same value several times."""
        self.counts[bisect_left(self.bounds, value)] += num_times
        self.total += value * num_times

    def as_dict(self) -> dict[str, Any]:
        """As msgpack and JSON can hold it."""
        return {"bounds": list(self.bounds), "counts": list(self.counts), "sum": self.total}
