"""What a simulation is made of, and the requests that its seed draws.

Knows no scheduler. Every draw comes from one `random.Random(seed)`, in a fixed order, so that a
seed replays exactly.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

from quire.core.kv_groups import KVGroup, KVKind
from quire.core.request import Request
from quire.core.sampling_params import DecodingParams
from quire.errors import ConfigurationError
from quire.simulation.fake_model import FakeModel

ARRIVALS = ("poisson", "bursts", "at_once")
NUM_SHARED_PREFIXES = 4
BURST_SIZE = 8
DEFAULT_NUM_REQUESTS = 100
STOP_TOKEN_ID = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationConfig:
    """One simulation. All rates are shares between 0 and 1.

    num_requests: how many arrive. num_steps: none arrives after so many steps. None: no such end;
        if both are None, 100 arrive.
    arrivals: "poisson" or "bursts" (of 8) at requests_per_s on the virtual clock, or "at_once".
    prompt_tokens, output_tokens: the shortest and the longest, drawn evenly.
    shared_prefix_rate: prompts that begin with one of 4 shared prefixes.
    abort_rate: requests aborted at a random moment. max_abort_age_steps: at most so late.
    stop_rate: requests that also end at token 1, of their own wish.
    logprobs_rate: requests that ask for log-probabilities, of prompt and output each.
    step_failure_rate: steps that fail as a whole. poison_rate: requests that make every step fail
        that they are in. nan_rate: requests that fail alone.
    overlap: steps planned ahead of the last result, 0 or 1. check_every: steps from one check of
        all accounting laws to the next.
    """

    seed: int = 0
    num_requests: int | None = None
    num_steps: int | None = None
    num_blocks: int = 48
    block_size: int = 4
    num_groups: int = 1
    max_num_seqs: int = 8
    max_num_batched_tokens: int = 32
    policy: str = "fcfs"
    enable_prefix_caching: bool = True
    max_model_len: int = 120
    arrivals: str = "poisson"
    requests_per_s: float = 20.0
    prompt_tokens: tuple[int, int] = (1, 40)
    output_tokens: tuple[int, int] = (1, 30)
    shared_prefix_rate: float = 0.5
    num_cache_domains: int = 2
    num_priorities: int = 3
    abort_rate: float = 0.1
    max_abort_age_steps: int = 30
    stop_rate: float = 0.1
    end_rate: float = 0.02
    logprobs_rate: float = 0.1
    step_failure_rate: float = 0.0
    poison_rate: float = 0.0
    nan_rate: float = 0.0
    overlap: int = 0
    vocab_size: int = 1000
    check_every: int = 1

    def __post_init__(self) -> None:
        if self.overlap not in (0, 1):
            raise ConfigurationError(f"overlap is {self.overlap}, but must be 0 or 1")
        if self.arrivals not in ARRIVALS:
            known = ", ".join(ARRIVALS)
            raise ConfigurationError(f"arrivals is {self.arrivals!r}, but must be one of {known}")
        if self.arrivals == "at_once" and self.max_num_requests == math.inf:
            raise ConfigurationError("arrivals is 'at_once', which needs num_requests")
        if self.check_every < 1:
            raise ConfigurationError(f"check_every is {self.check_every}, but must be at least 1")
        for name in ("prompt_tokens", "output_tokens"):
            low, high = getattr(self, name)
            if not 1 <= low <= high:
                raise ConfigurationError(f"{name} is {(low, high)}, but must be 1 <= low <= high")

    @property
    def max_num_requests(self) -> float:
        if self.num_requests is None and self.num_steps is None:
            return DEFAULT_NUM_REQUESTS
        return math.inf if self.num_requests is None else self.num_requests

    @property
    def model(self) -> FakeModel:
        return FakeModel(self.vocab_size, self.end_rate)

    @property
    def groups(self) -> tuple[KVGroup, ...]:
        return tuple(KVGroup((layer,), KVKind.FULL, 64) for layer in range(self.num_groups))

    @property
    def poison_token_id(self) -> int:
        return self.vocab_size

    @property
    def nan_token_id(self) -> int:
        return self.vocab_size + 1


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request, when it comes, and after how many further steps its client goes away, if it does.

    is_between: the abort comes between the planning of a step and its result, not before it.
    """

    request: Request
    at_s: float
    abort_age_steps: int | None
    is_between: bool


def draw_arrivals(config: SimulationConfig) -> Iterator[Arrival]:
    """The requests of a simulation in order of arrival; without end where no number was set."""
    rng = random.Random(config.seed)
    length = max(1, config.prompt_tokens[1] * 3 // 4)
    prefixes = [_tokens(rng, config, length) for _ in range(NUM_SHARED_PREFIXES)]
    now_s = 0.0
    for index in itertools.count():
        if index >= config.max_num_requests:
            return
        now_s += _pause_s(rng, config, index)
        request = _draw_request(rng, config, index, prefixes)
        is_aborted = rng.random() < config.abort_rate
        age = rng.randint(0, config.max_abort_age_steps) if is_aborted else None
        yield Arrival(request, now_s, age, rng.random() < 0.5)


def _pause_s(rng: random.Random, config: SimulationConfig, index: int) -> float:
    if config.arrivals == "at_once":
        return 0.0
    if config.arrivals == "bursts":
        is_first = index % BURST_SIZE == 0
        return rng.expovariate(config.requests_per_s / BURST_SIZE) if is_first else 0.0
    return rng.expovariate(config.requests_per_s)


def _tokens(rng: random.Random, config: SimulationConfig, count: int) -> list[int]:
    return [rng.randrange(config.vocab_size) for _ in range(count)]


def _draw_request(
    rng: random.Random, config: SimulationConfig, index: int, prefixes: list[list[int]]
) -> Request:
    length = min(rng.randint(*config.prompt_tokens), config.max_model_len - 1)
    prompt = _tokens(rng, config, length)
    if rng.random() < config.shared_prefix_rate:
        prefix = rng.choice(prefixes)
        prompt = [*prefix[: length - 1], *prompt[min(len(prefix), length - 1) :]]
    fault = rng.random()
    if fault < config.poison_rate:
        prompt[-1] = config.poison_token_id
    elif fault < config.poison_rate + config.nan_rate:
        prompt[-1] = config.nan_token_id
    max_tokens = rng.randint(*config.output_tokens)
    params = DecodingParams(
        max_tokens=max_tokens,
        min_tokens=rng.randint(0, max_tokens) if rng.random() < 0.2 else 0,
        seed=rng.getrandbits(64),
        end_token_ids=(config.model.end_token_id,) if rng.random() < 0.9 else (),
        stop_token_ids=(STOP_TOKEN_ID,) if rng.random() < config.stop_rate else (),
        logprobs=rng.randint(0, 3) if rng.random() < config.logprobs_rate else None,
        prompt_logprobs=rng.randint(0, 3) if rng.random() < config.logprobs_rate else None,
    )
    return Request(
        request_id=f"request-{index}",
        prompt_token_ids=prompt,
        params=params,
        n=rng.choice((1, 1, 1, 2)),
        priority=rng.randrange(max(1, config.num_priorities)),
        cache_domain=f"domain-{rng.randrange(max(1, config.num_cache_domains))}",
    )
