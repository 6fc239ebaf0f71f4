"""The figures of a replay (hit rate, times, refusals) as lines and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from quire.traces.trace import Trace

PERCENTILES = (50, 90, 99)


@dataclass(slots=True)
class Reply:
    """The times and tokens of one request. Times of events are seconds since the replay began."""

    #: The request's index in the trace.
    number: int
    #: The time of its arrival.
    at_s: float
    end_s: float = 0.0
    #: The time of its first token; None if no token came.
    first_s: float | None = None
    #: Number of prompt tokens; 0 if the server did not say how many were cached.
    num_prompt_tokens: int = 0
    #: Number of prompt tokens that came from the prefix cache.
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    #: Seconds between successive tokens of its first choice.
    gaps_s: list[float] = field(default_factory=list)
    #: HTTP status and error code, if the request got an error; None if there was no error.
    refused: str | None = None


@dataclass(slots=True)
class ReplayFigures:
    """The results of a replay and its summary."""

    trace: Trace
    #: The replies, one for each request that was sent.
    replies: Sequence[Reply]
    #: For each reason, the number of requests that were not sent.
    left_out: Mapping[str, int]
    #: Sentences that say how the replay differed from the trace.
    notes: Sequence[str] = ()

    @property
    def hit_rate(self) -> float | None:
        """The share, from 0 to 1, of answered requests' prompt tokens that came from the prefix
        cache; None if it is not known."""
        answered = [each for each in self.replies if each.first_s is not None]
        num_tokens = sum(each.num_prompt_tokens for each in answered)
        if not num_tokens:
            return None
        return sum(each.num_cached_tokens for each in answered) / num_tokens

    def data(self) -> dict[str, Any]:
        """The figures for JSON, with times in seconds; unknown figures are None."""
        answered = [each for each in self.replies if each.first_s is not None]
        first_s = min((each.at_s for each in self.replies), default=0.0)
        last_s = max((each.end_s for each in self.replies), default=0.0)
        duration_s = max(last_s - first_s, 1e-9)
        num_output = sum(each.num_output_tokens for each in answered)
        recorded = [each.first_s for each in self.trace.requests if each.first_s is not None]
        return {
            "requests": len(self.replies),
            "answered": len(answered),
            "refused": dict(Counter(each.refused for each in self.replies if each.refused)),
            "left_out": dict(self.left_out),
            "duration_s": duration_s,
            "prompt_tokens": sum(each.num_prompt_tokens for each in answered),
            "output_tokens": num_output,
            "hit_rate": self.hit_rate,
            "requests_per_s": len(answered) / duration_s,
            "output_tokens_per_s": num_output / duration_s,
            "ttft_s": spread([each.first_s - each.at_s for each in answered if each.first_s]),
            "itl_s": spread([gap for each in answered for gap in each.gaps_s]),
            "e2e_s": spread([each.end_s - each.at_s for each in answered]),
            "recorded": {"hit_rate": self.trace.hit_rate, "ttft_s": spread(recorded)},
            "notes": list(self.notes),
        }

    def lines(self) -> list[str]:
        """The figures as lines to print."""
        found = self.data()
        refused = _counted(found["refused"])
        recorded = found["recorded"]
        lines = [
            f"{found['answered']} of {found['requests']} requests answered in"
            f" {found['duration_s']:.1f} s{'; refused: ' + refused if refused else ''}",
            f"hit rate    {_percent(found['hit_rate'])}"
            f"{_with_recorded(_percent(recorded['hit_rate']), recorded['hit_rate'])}",
            f"TTFT        {_times(found['ttft_s'])}"
            f"{_with_recorded(_times(recorded['ttft_s']), recorded['ttft_s'])}",
            f"ITL         {_times(found['itl_s'])}",
            f"throughput  {found['output_tokens_per_s']:.1f} output tokens/s,"
            f" {found['requests_per_s']:.2f} requests/s",
        ]
        if found["left_out"]:
            lines.append(f"left out    {_counted(found['left_out'])}")
        return lines + list(self.notes)


def spread(values: Sequence[float]) -> dict[str, float] | None:
    """The mean and PERCENTILES of the values; None if there are no values."""
    if not values:
        return None
    ordered = sorted(values)
    last = len(ordered) - 1
    found = {"mean": sum(ordered) / len(ordered)}
    return found | {f"p{rank}": ordered[round(last * rank / 100)] for rank in PERCENTILES}


def _times(found: Mapping[str, float] | None) -> str:
    if found is None:
        return "-"
    return ", ".join(f"{name} {1000 * value:.1f} ms" for name, value in found.items())


def _percent(rate: float | None) -> str:
    return "-" if rate is None else f"{100 * rate:.1f}%"


def _with_recorded(text: str, given: object) -> str:
    return "" if given is None else f"  (recorded: {text})"


def _counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items())
