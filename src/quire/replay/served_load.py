"""Loads of `quire bench serve`: random lengths, lengths of ShareGPT's conversations, or a trace.

A load is a `Trace`, so `against_server` sends it. Arrivals are drawn from a seed: at a rate R, the
intervals have a gamma distribution with mean 1/R and shape `burstiness`, as in vLLM's benchmark.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

import numpy as np

from quire.bench.workload import WorkloadSpec, request_lengths
from quire.errors import ConfigurationError
from quire.traces.read import read_trace
from quire.traces.trace import Trace, TraceRequest, in_order

RANDOM, SHAREGPT, TRACE = "random", "sharegpt", "trace"
DATASETS = (RANDOM, SHAREGPT, TRACE)

CHARACTERS_PER_TOKEN = 4
"""Characters of English text for each token, in the mean."""

_BLOCK_TOKENS = 16
_LEAST_TOKENS = 4
"""ShareGPT's conversations with a shorter question or answer are left out, as in vLLM."""
_ARRIVALS = 2
"""The number of the stream of random numbers for arrivals; `bench.workload` has 0 and 1."""


@dataclass(frozen=True, slots=True)
class ServedLoadSpec:
    """The specification of a load."""

    #: One of DATASETS.
    dataset: str = RANDOM
    #: A file of ShareGPT's conversations, or of a trace; None draws ShareGPT's lengths.
    path: Path | None = None
    #: Number of requests; None means 100, or all requests of a trace.
    num_prompts: int | None = None
    #: Mean numbers of tokens of prompts and of answers, for random lengths.
    input_len: int = 512
    output_len: int = 128
    #: Random lengths are drawn from (1 - range_ratio) to (1 + range_ratio) times these.
    range_ratio: float = 0.0
    #: Number of further tokens with which all prompts of random lengths begin.
    prefix_len: int = 0
    #: Requests per second; infinity sends all at once, and None keeps the times of a trace.
    rate: float | None = None
    #: The shape of the distribution of intervals; 1 is a Poisson process.
    burstiness: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        """Raises ConfigurationError."""
        _check_above_0("request_rate", self.rate)
        _check_above_0("burstiness", self.burstiness)
        if not 0 <= self.range_ratio < 1:
            raise ConfigurationError(
                f"range_ratio is {self.range_ratio:g}, but must be at least 0 and below 1"
            )
        if self.dataset == TRACE and self.path is None:
            raise ConfigurationError(
                "dataset_name is 'trace', which needs dataset_path: a recording of"
                " `quire serve --record`, or a trace in Mooncake's or Azure's format"
            )
        if self.dataset == RANDOM and self.path is not None:
            raise ConfigurationError(
                f"dataset_path is {str(self.path)!r}, but dataset_name is 'random', which reads no"
                " file; leave it out, or name another data set"
            )


def _check_above_0(name: str, value: float | None) -> None:
    if value is not None and not value > 0:
        raise ConfigurationError(f"{name} is {value:g}, but must be above 0")


DEFAULT_NUM_PROMPTS = 100


def make_load(spec: ServedLoadSpec) -> Trace:
    """The requests of a load in the order of their arrival. Raises ConfigurationError."""
    if spec.dataset == TRACE:
        assert spec.path is not None, "it was checked"
        trace = read_trace(spec.path)
        if spec.num_prompts is not None:
            trace = trace.first(spec.num_prompts)
        if not trace.requests:
            raise ConfigurationError(f"{spec.path} has no requests")
        return trace if spec.rate is None else _at_rate(trace, spec)
    lengths = _lengths(spec)
    # The prefix is one block with an id, and the rest of each prompt has none.
    is_shared = spec.dataset == RANDOM and spec.prefix_len > 0
    shared, block_tokens = ((0,), spec.prefix_len) if is_shared else ((), _BLOCK_TOKENS)
    requests = [TraceRequest(0.0, num_in, num_out, shared) for num_in, num_out in lengths]
    return _at_rate(Trace(block_tokens, tuple(requests)), spec)


def _lengths(spec: ServedLoadSpec) -> Sequence[tuple[int, int]]:
    """(prompt tokens, output tokens) of each request."""
    count = spec.num_prompts or DEFAULT_NUM_PROMPTS
    if spec.dataset == SHAREGPT:
        if spec.path is not None:
            return _sharegpt_lengths(spec.path, count)
        return request_lengths(WorkloadSpec(num_prompts=count, seed=spec.seed))
    generator = np.random.default_rng(spec.seed)
    drawn = [
        generator.integers(
            max(1, math.floor(mean * (1 - spec.range_ratio))),
            math.ceil(mean * (1 + spec.range_ratio)),
            count,
            endpoint=True,
        )
        for mean in (spec.input_len, spec.output_len)
    ]
    return [
        (spec.prefix_len + int(num_in), int(num_out))
        for num_in, num_out in zip(*drawn, strict=True)
    ]


def _sharegpt_lengths(path: Path, count: int) -> Sequence[tuple[int, int]]:
    """The lengths of the first question and answer of each conversation, estimated from their
    characters."""
    try:
        turns = [each["conversations"][:2] for each in json.loads(path.read_text("utf-8"))]
        texts = [(pair[0]["value"], pair[1]["value"]) for pair in turns if len(pair) == 2]
    except OSError as error:
        raise ConfigurationError(f"{path} can't be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(
            f"{path} is no file of ShareGPT: it must hold a list of objects with `conversations`,"
            " each a list of objects with a `value`"
        ) from error
    sizes = [tuple(len(text) // CHARACTERS_PER_TOKEN for text in pair) for pair in texts]
    found = [(size[0], size[1]) for size in sizes if min(size) >= _LEAST_TOKENS]
    if not found:
        raise ConfigurationError(f"{path} has no conversation with a question and an answer")
    return found[:count]


def _at_rate(trace: Trace, spec: ServedLoadSpec) -> Trace:
    """The trace with arrivals at the specified rate, and without parents."""
    count, rate = len(trace.requests), spec.rate
    times = [0.0] * count
    if rate is not None and math.isfinite(rate):
        generator = np.random.default_rng((spec.seed, _ARRIVALS))
        gaps = generator.gamma(spec.burstiness, 1 / (rate * spec.burstiness), count - 1)
        times = list(accumulate(map(float, gaps), initial=0.0))
    requests = (
        replace(request, at_s=at_s, parent=None, think_s=0.0)
        for request, at_s in zip(trace.requests, times, strict=True)
    )
    return replace(trace, requests=in_order(requests))
