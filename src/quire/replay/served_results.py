"""The results of `quire bench serve`, as lines and as vLLM's JSON."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from quire.bench.metrics import LATENCIES, Timeline, figures
from quire.errors import ConfigurationError
from quire.replay.figures import ReplayFigures, Reply

GOODPUT_METRICS = ("ttft", "tpot", "e2el")


@dataclass(frozen=True, slots=True)
class ServedResults:
    """The figures of one run."""

    #: Facts about the run under vLLM's key names, such as model_id and request_rate.
    setting: Mapping[str, Any]
    figures: ReplayFigures
    #: Bounds in milliseconds on GOODPUT_METRICS that a good request keeps; empty for none.
    goodput: Mapping[str, float]
    #: Percentiles of the latencies to report, from 0 to 100.
    percentiles: Sequence[float]

    @property
    def answered(self) -> list[Reply]:
        """The replies with tokens and without an error."""
        found = self.figures.replies
        return [each for each in found if each.first_s is not None and each.refused is None]

    def data(self, *, is_detailed: bool = False) -> dict[str, Any]:
        """All figures under vLLM's key names. `is_detailed` adds figures of each request."""
        replies, sent = self.answered, self.figures.replies
        first_s = min((each.at_s for each in sent), default=0.0)
        duration_s = max(max((each.end_s for each in sent), default=0.0) - first_s, 1e-9)
        timelines = [timeline_of(each) for each in replies]
        found: dict[str, Any] = {
            **self.setting,
            **figures(timelines, duration_s, self.percentiles),
            "failed": len(sent) - len(replies),
            "errors_by_code": self.figures.data()["refused"],
            "left_out": dict(self.figures.left_out),
            "request_goodput": None,
            "max_concurrent_requests": _most_at_once(sent),
        }
        if self.goodput:
            num_good = sum(self._is_good(each) for each in timelines)
            found["request_goodput"] = num_good / duration_s
            found["goodput_slo_ms"] = dict(self.goodput)
        if is_detailed:
            found |= {
                "input_lens": [each.num_prompt_tokens for each in replies],
                "output_lens": [each.num_output_tokens for each in replies],
                "ttfts": [each.ttft_s for each in timelines],
                "itls": [each.itl_s for each in timelines],
                "start_times": [each.at_s for each in replies],
                "errors": [each.refused or "" for each in sent],
            }
        return found

    def lines(self) -> list[str]:
        """The figures to print."""
        found = self.data()
        rows: list[tuple[str, str]] = [
            ("successful requests", f"{found['completed']}"),
            ("failed requests", f"{found['failed']}{_counted(found['errors_by_code'])}"),
            ("left out", f"{sum(found['left_out'].values())}{_counted(found['left_out'])}"),
            ("duration", f"{found['duration']:.2f} s"),
            ("prompt tokens", f"{found['total_input_tokens']}"),
            ("output tokens", f"{found['total_output_tokens']}"),
            ("requests/s", f"{found['request_throughput']:.2f}"),
            ("output tokens/s", f"{found['output_throughput']:.2f}"),
            ("all tokens/s", f"{found['total_token_throughput']:.2f}"),
            ("most requests at once", f"{found['max_concurrent_requests']}"),
        ]
        if self.goodput:
            bounds = ", ".join(f"{name} {value:g} ms" for name, value in self.goodput.items())
            rows.append(("goodput", f"{found['request_goodput']:.2f} requests/s within {bounds}"))
        lines = [f"{name:<24}{value}" for name, value in rows if name != "left out" or value != "0"]
        heads = ["mean", "median", *(_named(each) for each in self.percentiles)]
        lines += ["", f"{'milliseconds':<24}" + "".join(f"{head:>12}" for head in heads)]
        for name in LATENCIES:
            cells = (_cell(found[f"{head}_{name}_ms"]) for head in heads)
            lines.append(f"{name.upper():<24}" + "".join(f"{cell:>12}" for cell in cells))
        return [*lines, *self.figures.notes]

    def _is_good(self, timeline: Timeline) -> bool:
        """Whether a request keeps all bounds. An answer of one token has no time per output token,
        and keeps that bound."""
        times = {"ttft": timeline.ttft_s, "tpot": timeline.tpot_s or 0.0, "e2el": timeline.e2el_s}
        return all(1e3 * times[name] <= bound for name, bound in self.goodput.items())


def timeline_of(reply: Reply) -> Timeline:
    """The times of a reply that has tokens."""
    assert reply.first_s is not None, "it has tokens"
    times = list(accumulate(reply.gaps_s, initial=reply.first_s))
    return Timeline(
        reply.num_prompt_tokens, reply.at_s, times, num_output_tokens=reply.num_output_tokens
    )


def parse_goodput(pairs: Sequence[str]) -> dict[str, float]:
    """Parse pairs such as "ttft:500", in milliseconds. Raises ConfigurationError."""
    found: dict[str, float] = {}
    for pair in pairs:
        name, _, text = pair.partition(":")
        try:
            bound = float(text)
        except ValueError:
            bound = -1.0
        if name not in GOODPUT_METRICS or name in found or not bound >= 0:
            raise ConfigurationError(
                f"goodput has {pair!r:.80}, but must be NAME:MILLISECONDS, with each of"
                f" {', '.join(GOODPUT_METRICS)} at most once, such as ttft:500"
            )
        found[name] = bound
    return found


def write_results(results: ServedResults, path: Path, *, is_detailed: bool) -> None:
    """Write the results as JSON. Raises ConfigurationError if the file can't be written."""
    try:
        path.write_text(json.dumps(results.data(is_detailed=is_detailed), indent=1) + "\n")
    except OSError as error:
        raise ConfigurationError(
            f"the results can't be written to {str(path)!r} ({error.strerror})"
        ) from error


def _most_at_once(replies: Sequence[Reply]) -> int:
    """Maximum number of requests that were open at one time."""
    changes = sorted([(each.at_s, 1) for each in replies] + [(each.end_s, -1) for each in replies])
    return max(accumulate(change for _, change in changes), default=0)


def _counted(counts: Mapping[str, int]) -> str:
    return f" ({', '.join(f'{count} {name}' for name, count in counts.items())})" if counts else ""


def _cell(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _named(percentile: float) -> str:
    return f"p{percentile:g}"
