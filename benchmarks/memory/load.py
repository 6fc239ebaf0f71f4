"""The load of the memory benchmark: lengths and arrival times.

Lengths are log-normal with a given mean. Knows no engine and no clock. Used by
`command` and `study`.
"""

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from quire.bench.workload import BenchRequest
from quire.errors import ConfigurationError

_BISECTIONS = 60
# Streams of random numbers that never meet: what they draw is the key after the seed.
_LENGTHS, _ARRIVALS, _TOKENS = 0, 1, 2


@dataclass(frozen=True, slots=True)
class Shape:
    """The lengths of requests of one kind, and their rate. Means are in tokens."""

    input_mean: int
    output_mean: int
    requests_per_s: float


SHAPES = {
    # Kwon et al., "Efficient Memory Management for Large Language Model Serving with
    # PagedAttention" (SOSP 2023), section 6.1 and figure 13: the means of both data sets, and the
    # rate at which the numbers of requests in a batch were counted (OPT-13B, A100 of 40 GB).
    "sharegpt": Shape(161, 338, 2.0),
    "alpaca": Shape(19, 58, 30.0),
}


@dataclass(frozen=True, slots=True)
class MemoryLoad:
    """The load to make.

    input_mean, output_mean: in tokens, of what is drawn, after the cut to 1 .. max_model_len / 2.
    sigma: standard deviation of the logarithm of both lengths; 0 makes all equal. With 0.8 the
        published shares of memory come out about right: they mean that a running request has 440
        tokens on average (38.2% of 15,700 slots, 13.6 requests), hence how much longer than the
        mean those are that run long.
    requests_per_s: of a Poisson process; infinite: all are there at once.
    """

    num_prompts: int = 600
    input_mean: int = 161
    output_mean: int = 338
    sigma: float = 0.8
    requests_per_s: float = 2.0
    max_model_len: int = 2048
    seed: int = 1234

    def __post_init__(self) -> None:
        """Raises ConfigurationError that names the option."""
        longest = self.max_model_len // 2
        for name, value, low in (
            ("num_prompts", self.num_prompts, 1),
            ("seed", self.seed, 0),
            ("max_model_len", self.max_model_len, 4),
        ):
            if value < low:
                raise ConfigurationError(f"{name} is {value}, but must be at least {low}")
        for name, mean in (("input_mean", self.input_mean), ("output_mean", self.output_mean)):
            if not 1 <= mean <= longest:
                raise ConfigurationError(
                    f"{name} is {mean}, but must be from 1 to {longest}, half of max_model_len"
                )
        if not 0 <= self.sigma <= 3:
            raise ConfigurationError(f"sigma is {self.sigma}, but must be from 0 to 3")
        if not self.requests_per_s > 0:
            raise ConfigurationError(
                f"request_rate is {self.requests_per_s}, but must be above 0, or inf"
            )


@dataclass(frozen=True, slots=True)
class Budget:
    """The memory that all allocators get, and how wide a step may be.

    num_slots: rounded down to whole blocks.
    """

    num_slots: int = 15_700
    block_size: int = 16
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048

    def __post_init__(self) -> None:
        """Raises ConfigurationError that names the option."""
        if self.block_size < 1:
            raise ConfigurationError(f"block_size is {self.block_size}, but must be at least 1")
        if self.num_blocks < 1:
            raise ConfigurationError(
                f"num_slots is {self.num_slots}, but must hold a block of {self.block_size} tokens"
            )

    @property
    def num_blocks(self) -> int:
        return self.num_slots // self.block_size


def draw_lengths(load: MemoryLoad) -> list[tuple[int, int]]:
    """(prompt tokens, output tokens) of each request."""
    generator = np.random.default_rng((load.seed, _LENGTHS))
    longest = load.max_model_len // 2
    inputs, outputs = (
        _log_normal(generator, load.num_prompts, mean, load.sigma, longest)
        for mean in (load.input_mean, load.output_mean)
    )
    return list(zip(inputs.tolist(), outputs.tolist(), strict=True))


def draw_arrivals(load: MemoryLoad) -> list[float]:
    """Seconds from the start at which each request comes, ascending."""
    if math.isinf(load.requests_per_s):
        return [0.0] * load.num_prompts
    generator = np.random.default_rng((load.seed, _ARRIVALS))
    gaps = generator.exponential(1 / load.requests_per_s, load.num_prompts)
    return [float(at_s) for at_s in np.cumsum(gaps)]


def make_memory_requests(load: MemoryLoad, vocab_size: int) -> list[BenchRequest]:
    """The requests in order of arrival; random tokens, so that no two share a prefix."""
    generator = np.random.default_rng((load.seed, _TOKENS))
    return [
        BenchRequest(index, generator.integers(0, vocab_size, prompt_len).tolist(), output_len)
        for index, (prompt_len, output_len) in enumerate(draw_lengths(load))
    ]


def _log_normal(
    generator: np.random.Generator, count: int, mean: int, sigma: float, longest: int
) -> npt.NDArray[np.int64]:
    """Whole numbers from 1 to longest whose mean is `mean`, but for half a token.

    One at each of `count` equally likely quantiles, in random order, so that a small load has the
    shape of a large one. The cut at `longest` takes off the mean: so the location is found by
    bisection for the very numbers that are used.
    """
    quantiles = (generator.permutation(count) + 0.5) / count
    spread = sigma * np.array([NormalDist().inv_cdf(at) for at in quantiles.tolist()])

    def lengths(location: float) -> npt.NDArray[np.int64]:
        return np.clip(np.rint(np.exp(location + spread)), 1, longest).astype(np.int64)

    low, high = math.log(mean) - 10 * (sigma + 1), math.log(longest) + 10 * (sigma + 1)
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if lengths(middle).mean() < mean else (low, middle)
    return lengths(high)
