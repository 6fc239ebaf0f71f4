"""What a simulated fleet did, as numbers and as a line of a table."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

HEADER = (
    "| policy | hits | TTFT p50 / p99 s | mean s | ITL p50 / p99 ms | busiest | a decision |",
    "|---|---:|---:|---:|---:|---:|---:|",
)


@dataclass(slots=True)
class FleetReport:
    """What requests met, and what replicas did.

    num_hit_tokens: of prompts, that replicas' caches had; num_expected_tokens: that the router
        expected. ttfts_s: one for each request; itls_s: one for each further token.
    busy_s: of each replica, in steps. decisions_s: what placing took the router, by this machine's
        clock; all else is on the virtual one.
    """

    policy: str
    num_prompt_tokens: int = 0
    num_hit_tokens: int = 0
    num_expected_tokens: int = 0
    ttfts_s: array[float] = field(default_factory=lambda: array("d"))
    itls_s: array[float] = field(default_factory=lambda: array("d"))
    busy_s: list[float] = field(default_factory=list)
    decisions_s: array[float] = field(default_factory=lambda: array("d"))
    end_s: float = 0.0

    @property
    def num_requests(self) -> int:
        return len(self.ttfts_s)

    @property
    def hit_rate(self) -> float:
        """Share of the prompts' tokens that were cached where they came to."""
        return self.num_hit_tokens / max(1, self.num_prompt_tokens)

    @property
    def expected_hit_rate(self) -> float:
        """The share that the router expected when it placed them."""
        return self.num_expected_tokens / max(1, self.num_prompt_tokens)

    @property
    def mean_ttft_s(self) -> float:
        return sum(self.ttfts_s) / max(1, len(self.ttfts_s))

    @property
    def imbalance(self) -> float:
        """How many times as long as the mean the busiest replica was in steps."""
        total_s = sum(self.busy_s)
        return max(self.busy_s) * len(self.busy_s) / total_s if total_s else 1.0

    def line(self) -> str:
        """A row under HEADER."""
        ttft = f"{quantile(self.ttfts_s, 0.5):.2f} / {quantile(self.ttfts_s, 0.99):.2f}"
        itl = f"{1e3 * quantile(self.itls_s, 0.5):.0f} / {1e3 * quantile(self.itls_s, 0.99):.0f}"
        decision = f"{1e6 * quantile(self.decisions_s, 0.5):.0f} µs"
        return (
            f"| {self.policy} | {self.hit_rate:.2%} | {ttft} | {self.mean_ttft_s:.2f} | {itl} |"
            f" {self.imbalance:.2f} | {decision} |"
        )


def quantile(values: array[float], share: float) -> float:
    """The smallest value that at least this share of them does not exceed; 0 where there are
    none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0
