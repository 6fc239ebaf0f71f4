"""The load of a benchmark: seeded lengths and random tokens, all at t=0.

Lengths are log-normal and depend only on the spec. Token ids also depend on the round, so that no
round finds prefixes of another round in the cache. Used by `throughput` and `compare`.
"""

import math
from dataclasses import dataclass

import numpy as np

from quire.errors import ConfigurationError

# Independent streams of random numbers. Each stream's generator is seeded with (seed, number of the
# stream, ...).
_PREFIX_STREAM, _PROMPT_STREAM = 0, 1


@dataclass(frozen=True, slots=True)
class LengthSpec:
    """Log-normal lengths in tokens, limited to low..high."""

    #: The mean before the lengths are limited.
    mean: int
    low: int
    high: int


@dataclass(frozen=True, slots=True)
class WorkloadSpec:
    """The specification of a load."""

    num_prompts: int = 192
    input: LengthSpec = LengthSpec(220, 16, 1024)
    output: LengthSpec = LengthSpec(180, 8, 512)
    #: Standard deviation of the logarithm of both lengths; 0 makes all lengths equal the mean.
    sigma: float = 0.8
    seed: int = 1234
    #: Length of a prefix that all prompts of a round share, in addition to `input`.
    shared_prefix_tokens: int = 0
    #: Keep only this many requests, from the start of the load; None keeps all.
    limit: int | None = None

    def __post_init__(self) -> None:
        """Raises ConfigurationError, which names the option."""
        _at_least("num_prompts", self.num_prompts, 1)
        _at_least("seed", self.seed, 0)
        _at_least("shared_prefix_tokens", self.shared_prefix_tokens, 0)
        if self.limit is not None:
            _at_least("limit", self.limit, 1)
        if not 0 <= self.sigma <= 10:
            raise ConfigurationError(f"sigma is {self.sigma}, but must be from 0 to 10")
        for name, lengths in (("input", self.input), ("output", self.output)):
            _at_least(f"{name}_min", lengths.low, 1)
            if not lengths.low <= lengths.mean <= lengths.high:
                raise ConfigurationError(
                    f"{name}_mean is {lengths.mean}, outside {lengths.low} to {lengths.high};"
                    f" change it, {name}_min or {name}_max"
                )


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """One request of the load."""

    index: int
    prompt_token_ids: list[int]
    #: The exact number of tokens to generate, as end tokens are ignored.
    output_len: int

    @property
    def num_tokens(self) -> int:
        return len(self.prompt_token_ids) + self.output_len


def request_lengths(spec: WorkloadSpec) -> list[tuple[int, int]]:
    """(prompt tokens, output tokens) of each request, including the shared prefix."""
    generator = np.random.default_rng(spec.seed)
    inputs = _draw(generator, spec, spec.input)
    outputs = _draw(generator, spec, spec.output)
    inputs = [spec.shared_prefix_tokens + length for length in inputs]
    return list(zip(inputs, outputs, strict=True))[: spec.limit]


def make_requests(spec: WorkloadSpec, vocab_size: int, round_index: int) -> list[BenchRequest]:
    """The requests of one round, in order of arrival."""
    prefix = _tokens(vocab_size, spec.shared_prefix_tokens, spec.seed, _PREFIX_STREAM, round_index)
    requests = []
    for index, (prompt_len, output_len) in enumerate(request_lengths(spec)):
        num_own = prompt_len - len(prefix)
        own = _tokens(vocab_size, num_own, spec.seed, _PROMPT_STREAM, round_index, index)
        requests.append(BenchRequest(index, prefix + own, output_len))
    return requests


def _draw(generator: np.random.Generator, spec: WorkloadSpec, lengths: LengthSpec) -> list[int]:
    # The mean of a log-normal distribution is exp(mu + sigma^2 / 2).
    mu = math.log(lengths.mean) - spec.sigma**2 / 2
    drawn = np.rint(generator.lognormal(mu, spec.sigma, spec.num_prompts))
    return [int(length) for length in np.clip(drawn, lengths.low, lengths.high)]


def _tokens(vocab_size: int, count: int, *key: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(key).integers(0, vocab_size, count)]


def _at_least(name: str, value: int, low: int) -> None:
    if value < low:
        raise ConfigurationError(f"{name} is {value}, but must be at least {low}")
