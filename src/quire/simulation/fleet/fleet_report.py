"""The results of a simulated fleet, as numbers and as a row of a Markdown table."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

HEADER = (
    "| policy | hits | TTFT p50 / p99 s | mean s | ITL p50 / p99 ms | busiest | a decision |",
    "|---|---:|---:|---:|---:|---:|---:|",
)


@dataclass(slots=True)
class FleetReport:
    """The results of a routing policy. Times are on the virtual clock, except for decisions_s."""

    policy: str
    num_prompt_tokens: int = 0
    #: Prompt tokens found in the prefix caches of the chosen replicas.
    num_hit_tokens: int = 0
    #: Prompt tokens that the router expected to be cached when it placed the requests.
    num_expected_tokens: int = 0
    #: For each request, the time to its first token, in seconds.
    ttfts_s: array[float] = field(default_factory=lambda: array("d"))
    #: For each further token, the seconds since the request's previous token.
    itls_s: array[float] = field(default_factory=lambda: array("d"))
    #: For each replica, the seconds spent in steps.
    busy_s: list[float] = field(default_factory=list)
    #: For each request, the seconds of real time in which the router chose its replica.
    decisions_s: array[float] = field(default_factory=lambda: array("d"))
    #: The time at which the last request ended, in seconds.
    end_s: float = 0.0

    @property
    def hit_rate(self) -> float:
        """The share of prompt tokens that were found in the replicas' prefix caches."""
        return self.num_hit_tokens / max(1, self.num_prompt_tokens)

    @property
    def mean_ttft_s(self) -> float:
        return sum(self.ttfts_s) / max(1, len(self.ttfts_s))

    @property
    def imbalance(self) -> float:
        """The ratio of the busiest replica's time in steps to the mean of all replicas."""
        total_s = sum(self.busy_s)
        return max(self.busy_s) * len(self.busy_s) / total_s if total_s else 1.0

    def line(self) -> str:
        """The results as a row of the table under HEADER."""
        ttft = f"{quantile(self.ttfts_s, 0.5):.2f} / {quantile(self.ttfts_s, 0.99):.2f}"
        itl = f"{1e3 * quantile(self.itls_s, 0.5):.0f} / {1e3 * quantile(self.itls_s, 0.99):.0f}"
        decision = f"{1e6 * quantile(self.decisions_s, 0.5):.0f} µs"
        return (
            f"| {self.policy} | {self.hit_rate:.2%} | {ttft} | {self.mean_ttft_s:.2f} | {itl} |"
            f" {self.imbalance:.2f} | {decision} |"
        )


def quantile(values: array[float], share: float) -> float:
    """The quantile of the values at `share`, which is 0 to 1. Returns 0 if there are none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0
