"""Computes latency and throughput from the times of tokens.

    TTFT  time to first token: from arrival to the first token
    TPOT  time per output token after the first: (E2EL - TTFT) / (output_len - 1), one per request
    ITL   inter-token latency: each gap between a request's consecutive tokens, over all requests
    E2EL  end-to-end latency: from arrival to the last token

A request with one output token has no TPOT and no ITL. This module reads no clock.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

Figures = dict[str, float | None]

LATENCIES = ("ttft", "tpot", "itl", "e2el")
PERCENTILES = (90, 99)


@dataclass(slots=True)
class Timeline:
    """A request's arrival time, and its requested tokens with the time of each."""

    num_prompt_tokens: int
    arrival_s: float
    token_times_s: list[float] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    #: Number of tokens by the server's count, if one time stands for several tokens; None: each has
    #: its time.
    num_output_tokens: int | None = None

    @property
    def num_tokens(self) -> int:
        """Number of output tokens."""
        times = len(self.token_times_s)
        return times if self.num_output_tokens is None else self.num_output_tokens

    @property
    def ttft_s(self) -> float:
        return self.token_times_s[0] - self.arrival_s

    @property
    def e2el_s(self) -> float:
        return self.token_times_s[-1] - self.arrival_s

    @property
    def itl_s(self) -> list[float]:
        times = self.token_times_s
        return [late - early for early, late in pairwise(times)]

    @property
    def tpot_s(self) -> float | None:
        count = self.num_tokens
        return (self.e2el_s - self.ttft_s) / (count - 1) if count > 1 else None


def figures(
    timelines: Sequence[Timeline], duration_s: float, percentiles: Sequence[float] = PERCENTILES
) -> Figures:
    """All figures of one run.

    duration_s is the time from the first arrival to the last end. A latency without samples is
    None, such as the ITL if all outputs have one token. `percentiles` are from 0 to 100.
    """
    num_input = sum(timeline.num_prompt_tokens for timeline in timelines)
    num_output = sum(timeline.num_tokens for timeline in timelines)
    found: Figures = {
        "duration": duration_s,
        "completed": len(timelines),
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": len(timelines) / duration_s,
        "output_throughput": num_output / duration_s,
        "total_token_throughput": (num_input + num_output) / duration_s,
    }
    samples = {
        "ttft": [timeline.ttft_s for timeline in timelines],
        "tpot": [value for timeline in timelines if (value := timeline.tpot_s) is not None],
        "itl": [gap for timeline in timelines for gap in timeline.itl_s],
        "e2el": [timeline.e2el_s for timeline in timelines],
    }
    for name in LATENCIES:
        found |= _distribution(name, samples[name], percentiles)
    return found


def _distribution(name: str, seconds: Sequence[float], percentiles: Sequence[float]) -> Figures:
    keys = ["mean", "median", "std", *(f"p{percent:g}" for percent in percentiles)]
    if not seconds:
        return {f"{key}_{name}_ms": None for key in keys}
    values = np.array(seconds) * 1e3
    # As in vLLM: the standard deviation of the population, and linearly interpolated percentiles.
    found = [np.mean(values), np.median(values), np.std(values)]
    found += [np.percentile(values, percent) for percent in percentiles]
    return {f"{key}_{name}_ms": float(value) for key, value in zip(keys, found, strict=True)}


def medians(rounds: Sequence[Mapping[str, float | None]]) -> Figures:
    """The median of each figure over the rounds; None if the figure is None in any round."""
    found: Figures = {}
    for key in rounds[0]:
        values = [value for figures in rounds if (value := figures[key]) is not None]
        found[key] = statistics.median(values) if len(values) == len(rounds) else None
    return found
