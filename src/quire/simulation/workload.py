"""The configuration of a simulation, and the requests that its seed draws.

All random numbers come from generators that are seeded by the config's seed, in a fixed order, so
that equal seeds give equal simulations. Independent of the scheduler.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

from quire.core.adapters import AdapterRef
from quire.core.content_spans import ContentSpan
from quire.core.kv_groups import KVGroup, KVKind
from quire.core.memory.eviction import DEFAULT_ORDER
from quire.core.memory.prefix_cache import PUBLIC_DOMAIN
from quire.core.pooling import PoolingKind, PoolingParams
from quire.core.request import Request
from quire.core.sampling_params import DecodingParams
from quire.errors import ConfigurationError
from quire.simulation.fakes.fake_adapters import BROKEN
from quire.simulation.fakes.fake_model import FakeModel
from quire.simulation.fakes.fake_source import BROKEN_CONTENT
from quire.simulation.step_time import STEP_BASE_S, STEP_TOKEN_S

ARRIVALS = ("poisson", "bursts", "at_once")
NUM_SHARED_PREFIXES = 4
NUM_REMEMBERED_REQUESTS = 16
BURST_SIZE = 8
LONGEST_DEADLINE_S = 20.0
DEFAULT_NUM_REQUESTS = 100
STOP_TOKEN_ID = 1
PAGE_BYTES = 64
#: The default size of each kind of KV group: tokens of a window, or pages of a recurrent state. 0
#: means that the kind has no size.
SIZES = {"full": 0, "latent": 0, "window": 10, "state": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationConfig:
    """The options of one simulation. All rates except requests_per_s are shares from 0 to 1."""

    seed: int = 0
    #: The number of requests that arrive; None means no limit, or 100 if num_steps is None, too.
    num_requests: int | None = None
    #: The number of steps after which no request arrives; None means no limit.
    num_steps: int | None = None
    num_blocks: int = 48
    block_size: int = 4
    #: The number of KV groups with full attention, unless `kinds` is given.
    num_groups: int = 1
    #: The kinds of the KV groups, separated by commas: `full`, `latent`, `window` or `state`. The
    #: group `window:9` has a window of 9 tokens (default 10); `state:3` has 3 pages (default 2).
    kinds: str = ""
    #: The tokens between two periodic snapshots of a recurrent state, a multiple of the block size;
    #: 0 means the KV memory's default.
    snapshot_tokens: int = 0
    max_num_seqs: int = 8
    max_num_batched_tokens: int = 32
    num_lookahead_blocks: int = 1
    #: Whether a preempted sequence loses all its blocks, not only the needed number.
    preempts_whole: bool = False
    #: Whether admission predicts the lengths of outputs.
    forecasts: bool = True
    #: A name in `core.scheduling.policy.POLICIES`.
    policy: str = "fcfs"
    #: Arguments of the policy's constructor, such as (("ageing_s", 2.0),).
    policy_options: tuple[tuple[str, float], ...] = ()
    #: A name in `core.memory.eviction.EVICTION_ORDERS`.
    eviction: str = DEFAULT_ORDER
    enable_prefix_caching: bool = True
    max_model_len: int = 120
    #: Either "poisson" or "bursts" (of 8) at requests_per_s on the virtual clock, or "at_once".
    arrivals: str = "poisson"
    requests_per_s: float = 20.0
    #: No request arrives while this many wait.
    max_num_waiting: int = 1000
    #: The minimum and maximum number of prompt tokens, drawn uniformly.
    prompt_tokens: tuple[int, int] = (1, 40)
    #: The minimum and maximum number of output tokens, drawn uniformly.
    output_tokens: tuple[int, int] = (1, 30)
    #: The share of prompts that begin with one of 4 shared prefixes.
    shared_prefix_rate: float = 0.5
    #: The share of prompts that begin with a random number of an earlier prompt's tokens.
    near_rate: float = 0.0
    #: The share of requests that arrive together with the previous request, with its prompt.
    repeat_rate: float = 0.0
    #: The minimum and maximum number of branches of a request.
    num_branches: tuple[int, int] = (1, 2)
    #: The share of requests with a beam search.
    beam_rate: float = 0.0
    #: The minimum and maximum number of beams of a search.
    beam_width: tuple[int, int] = (2, 4)
    #: The share of steps before which a client forks a sequence, while requests still arrive.
    fork_rate: float = 0.0
    num_cache_domains: int = 2
    #: The share of requests in the cache domain that all tenants may read.
    public_rate: float = 0.0
    num_priorities: int = 3
    num_tenants: int = 3
    #: The share of requests with a deadline of 0 to 20 s.
    deadline_rate: float = 0.0
    #: The share of requests that are aborted at a random time.
    abort_rate: float = 0.1
    #: The maximum number of steps from a request's arrival to its abort.
    max_abort_age_steps: int = 30
    #: The share of requests with token 1 as a stop token.
    stop_rate: float = 0.1
    #: The share of generated tokens that are the model's end token.
    end_rate: float = 0.02
    #: The share of requests that pool instead of generating tokens.
    pooling_rate: float = 0.0
    #: The shares of requests for log-probabilities of the output and, independently, of the prompt.
    logprobs_rate: float = 0.1
    #: The share of requests, except beam searches, whose tokens must match a grammar.
    grammar_rate: float = 0.0
    #: The maximum number of drafts that follow a sequence's tokens in a step; 0 means that nothing
    #: proposes drafts.
    max_drafts: int = 0
    #: The share of drafts that are wrong.
    draft_error_rate: float = 0.3
    #: Whether the runner has a drafter, too, which errs as often.
    has_drafter: bool = False
    #: The share of steps before which the scheduler crashes. A new scheduler resumes all requests.
    crash_rate: float = 0.0
    #: The share of steps that fail as a whole.
    step_failure_rate: float = 0.0
    #: The share of requests that make every step fail that computes them.
    poison_rate: float = 0.0
    #: The share of requests that fail without failing the step.
    nan_rate: float = 0.0
    #: See `pacing.PacingConfig`; 0 means no pacing.
    max_itl_ratio: float = 0.0
    #: The initial ratio of the pacer's predicted time of prompt tokens to their true time.
    predicted_ratio: float = 1.0
    #: The seconds that each step takes on the virtual clock, besides the time of its tokens.
    step_base_s: float = STEP_BASE_S
    #: The seconds that each token of a step takes on the virtual clock.
    step_token_s: float = STEP_TOKEN_S
    #: The share of steps that take five times as long, as if other programs used the machine.
    slow_rate: float = 0.0
    #: The share of requests with an adapter.
    adapter_rate: float = 0.0
    #: The number of adapters, drawn by Zipf's law; the last one can't be read.
    num_adapters: int = 6
    #: The number of slots for adapters.
    max_loras: int = 2
    #: The share of prompts with contents beside their tokens.
    content_rate: float = 0.0
    #: The number of contents, drawn by Zipf's law; the last one can't be read.
    num_contents: int = 6
    #: The number of slots for contents.
    num_content_slots: int = 2
    #: Whether each content is computed in one step.
    has_whole_contents: bool = False
    #: Fields of the `SimulatedTier` behind the pool; empty if there is no tier.
    tier: tuple[tuple[str, float], ...] = ()
    #: The number of steps that are planned before the previous result is known: 0 or 1.
    overlap: int = 0
    #: The probability, before and after each call of the runner, that Ctrl-C interrupts the step.
    interrupt_rate: float = 0.0
    vocab_size: int = 1000
    #: The number of steps between two checks of all invariants.
    check_every: int = 1

    def __post_init__(self) -> None:
        if self.overlap not in (0, 1):
            raise ConfigurationError(f"overlap is {self.overlap}, but must be 0 or 1")
        if self.arrivals not in ARRIVALS:
            known = ", ".join(ARRIVALS)
            raise ConfigurationError(f"arrivals is {self.arrivals!r}, but must be one of {known}")
        if self.arrivals == "at_once" and self.max_num_requests == math.inf:
            raise ConfigurationError("arrivals is 'at_once', which needs num_requests")
        if self.snapshot_tokens % self.block_size or self.snapshot_tokens < 0:
            raise ConfigurationError(
                f"snapshot_tokens is {self.snapshot_tokens}, but must be whole blocks of"
                f" {self.block_size} tokens"
            )
        if self.kinds:
            read_groups(self.kinds)
        for name in ("check_every", "max_num_waiting"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"{name} is {getattr(self, name)}, but must be at least 1")
        for name in ("step_base_s", "step_token_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigurationError(f"{name} is {getattr(self, name)}, but must be above 0")
        for name in ("prompt_tokens", "output_tokens", "num_branches", "beam_width"):
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
        if self.kinds:
            return read_groups(self.kinds)
        return tuple(KVGroup((layer,), KVKind.FULL, PAGE_BYTES) for layer in range(self.num_groups))

    @property
    def poison_token_id(self) -> int:
        return self.vocab_size

    @property
    def nan_token_id(self) -> int:
        return self.vocab_size + 1


def read_groups(kinds: str) -> tuple[KVGroup, ...]:
    """The KV groups that `SimulationConfig.kinds` names. Raises ConfigurationError."""
    groups: list[KVGroup] = []
    for layer, word in enumerate(kinds.split(",")):
        name, _, number = word.partition(":")
        is_known = name in SIZES and (not number or (number.isdecimal() and int(number) > 0))
        if not is_known or (number and not SIZES[name]):
            raise ConfigurationError(
                f"kinds is {kinds!r}, but {word!r} is not one of full, latent, window, state,"
                " window:TOKENS and state:PAGES"
            )
        size = int(number) if number else SIZES[name]
        kind = KVKind(name)
        window = size if kind is KVKind.WINDOW else None
        num_state_blocks = size if kind is KVKind.STATE else 0
        groups.append(KVGroup((layer,), kind, PAGE_BYTES, window, num_state_blocks))
    return tuple(groups)


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request, with its time of arrival and of its abort, if any."""

    request: Request
    at_s: float
    #: Number of steps between the arrival and the abort; None if the client does not abort.
    abort_age_steps: int | None
    #: Whether the abort is made between a step's planning and its result, not before planning.
    is_between: bool


def draw_arrivals(config: SimulationConfig) -> Iterator[Arrival]:
    """Yields the requests in order of arrival, infinitely many if their number is not limited."""
    rng = random.Random(config.seed)
    length = max(1, config.prompt_tokens[1] * 3 // 4)
    prefixes = [_tokens(rng, config, length) for _ in range(NUM_SHARED_PREFIXES)]
    earlier: deque[Request] = deque(maxlen=NUM_REMEMBERED_REQUESTS)
    now_s = 0.0
    for index in itertools.count():
        if index >= config.max_num_requests:
            return
        is_repeated = bool(earlier) and rng.random() < config.repeat_rate
        if not is_repeated:
            now_s += _pause_s(rng, config, index)
        request = _draw_request(rng, config, index, _draw_prompt(rng, config, prefixes, earlier))
        request = _with_adapter(config, index, _as_pooling(config, index, request))
        if is_repeated:
            before = earlier[-1]
            request = replace(
                request,
                prompt_token_ids=before.prompt_token_ids,
                cache_domain=before.cache_domain,
            )
            request = _in_steps_that_fit(config, request)
        request = _with_contents(config, index, request, earlier[-1] if is_repeated else None)
        earlier.append(request)
        is_aborted = rng.random() < config.abort_rate
        age = rng.randint(0, config.max_abort_age_steps) if is_aborted else None
        yield Arrival(request, now_s, age, rng.random() < 0.5)


def _with_adapter(config: SimulationConfig, index: int, request: Request) -> Request:
    """The request, to which an adapter is added at random."""
    rng = random.Random(f"adapter {index} of {config.seed}") if config.adapter_rate else None
    if rng is None or rng.random() >= config.adapter_rate:
        return request
    numbers = range(config.num_adapters)
    (number,) = rng.choices(numbers, [1 / (1 + each) for each in numbers])
    kind = BROKEN if number == config.num_adapters - 1 else "adapter"
    return replace(request, adapter=AdapterRef(f"name-{number}", "", f"{kind}-{number}"))


def _with_contents(
    config: SimulationConfig, index: int, request: Request, repeated: Request | None
) -> Request:
    """The request with contents at random places of its prompt. A request that repeats a prompt has
    its contents at the same places, so that often only the contents differ."""
    rng = random.Random(f"contents {index} of {config.seed}") if config.content_rate else None
    if rng is None or (repeated is None and rng.random() >= config.content_rate):
        return request
    prompt = list(request.prompt_token_ids)
    if repeated is not None:
        places = [span[:2] for span in repeated.content_spans]
    else:
        places = _draw_places(random.Random(f"places {rng.randrange(3)} of {config.seed}"))
    numbers = range(config.num_contents)
    spans: list[ContentSpan] = []
    for first, count in places:
        count = min(count, len(prompt) - 1 - first)
        if count < 1:
            break
        (number,) = rng.choices(numbers, [1 / (1 + each) for each in numbers])
        kind = BROKEN_CONTENT if number == config.num_contents - 1 else "0" * len(BROKEN_CONTENT)
        digest, is_whole = f"{kind}{number:024x}", config.has_whole_contents
        spans.append(ContentSpan(first, count, digest, in_one_step=is_whole))
        prompt[first : first + count] = [0] * count
    if repeated is not None and rng.random() < 0.5:
        spans = list(repeated.content_spans)
    pooling = request.params.pooling
    if pooling is not None and spans:
        params = replace(request.params, pooling=replace(pooling, in_one_step=False))
        request = replace(request, params=params)
    return replace(request, prompt_token_ids=prompt, content_spans=tuple(spans))


def _draw_places(rng: random.Random) -> list[tuple[int, int]]:
    """The first position and length of each span of a layout."""
    places, end = [], 0
    for _ in range(rng.randint(1, 3)):
        first = end + rng.randint(0, 8)
        end = first + rng.randint(1, 12)
        places.append((first, end - first))
    return places


def _as_pooling(config: SimulationConfig, index: int, request: Request) -> Request:
    """The request, at random changed to pool its prompt."""
    rng = random.Random(f"pooling {index} of {config.seed}") if config.pooling_rate else None
    if rng is None or rng.random() >= config.pooling_rate:
        return request
    pooling = PoolingParams(rng.choice(list(PoolingKind)), in_one_step=rng.random() < 0.5)
    params = DecodingParams(max_tokens=1, seed=request.params.seed, pooling=pooling)
    return _in_steps_that_fit(config, replace(request, params=params, n=1))


def _in_steps_that_fit(config: SimulationConfig, request: Request) -> Request:
    """The request. If its prompt may not fit into one step, it is allowed to pool in several."""
    pooling = request.params.pooling
    is_paced = bool(config.max_itl_ratio)
    if pooling is None or (
        len(request.prompt_token_ids) <= config.max_num_batched_tokens and not is_paced
    ):
        return request
    pooling = replace(pooling, in_one_step=False)
    return replace(request, params=replace(request.params, pooling=pooling))


def draw_fork(rng: random.Random, params: DecodingParams, num_output_tokens: int) -> DecodingParams:
    """The parameters of a fork from a sequence with num_output_tokens tokens.

    They allow at least one more token. The seed is changed at random.
    """
    return replace(
        params,
        max_tokens=rng.randint(num_output_tokens + 1, params.max_tokens + 4),
        seed=rng.choice((params.seed, rng.getrandbits(64))),
        logprobs=rng.choice((params.logprobs, 2)),
    )


def _pause_s(rng: random.Random, config: SimulationConfig, index: int) -> float:
    if config.arrivals == "at_once":
        return 0.0
    if config.arrivals == "bursts":
        is_first = index % BURST_SIZE == 0
        return rng.expovariate(config.requests_per_s / BURST_SIZE) if is_first else 0.0
    return rng.expovariate(config.requests_per_s)


def _tokens(rng: random.Random, config: SimulationConfig, count: int) -> list[int]:
    return [rng.randrange(config.vocab_size) for _ in range(count)]


def _draw_prompt(
    rng: random.Random,
    config: SimulationConfig,
    prefixes: list[list[int]],
    earlier: Collection[Request],
) -> list[int]:
    length = min(rng.randint(*config.prompt_tokens), config.max_model_len - 1)
    prompt = _tokens(rng, config, length)
    if rng.random() < config.shared_prefix_rate:
        prefix = rng.choice(prefixes)
        prompt = [*prefix[: length - 1], *prompt[min(len(prefix), length - 1) :]]
    if earlier and rng.random() < config.near_rate:
        chosen = rng.choice(list(earlier)).prompt_token_ids
        known = [min(token_id, config.vocab_size - 1) for token_id in chosen]  # without faults
        common = rng.randint(1, min(len(known), length))
        prompt[:common] = known[:common]
    fault = rng.random()
    if fault < config.poison_rate:
        prompt[-1] = config.poison_token_id
    elif fault < config.poison_rate + config.nan_rate:
        prompt[-1] = config.nan_token_id
    return prompt


def _draw_request(
    rng: random.Random, config: SimulationConfig, index: int, prompt: list[int]
) -> Request:
    is_beam = rng.random() < config.beam_rate
    width = rng.randint(*config.beam_width)
    is_public = rng.random() < config.public_rate
    domain = f"domain-{rng.randrange(max(1, config.num_cache_domains))}"
    return Request(
        request_id=f"request-{index}",
        prompt_token_ids=prompt,
        params=_draw_params(rng, config, width if is_beam else 0),
        n=width if is_beam else rng.randint(*config.num_branches),
        priority=rng.randrange(max(1, config.num_priorities)),
        cache_domain=PUBLIC_DOMAIN if is_public else domain,
        tenant=f"tenant-{rng.randrange(max(1, config.num_tenants))}",
        deadline_s=rng.uniform(0, LONGEST_DEADLINE_S)
        if rng.random() < config.deadline_rate
        else None,
    )


def _draw_params(rng: random.Random, config: SimulationConfig, beam_width: int) -> DecodingParams:
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
    if not beam_width:
        return replace(params, grammar=_draw_grammar(config, params))
    return replace(
        params,
        min_tokens=0,
        logprobs=None,
        prompt_logprobs=None,
        beam_width=beam_width,
        length_penalty=rng.choice((0.0, 1.0, 2.0, -1.0)),
    )


def _draw_grammar(config: SimulationConfig, params: DecodingParams) -> str | None:
    """A grammar in the form of `fake_grammar`, or None.

    Grammars have a separate random generator, so that they don't change other random numbers.
    """
    rng = random.Random(f"grammar of {params.seed}")
    if rng.random() >= config.grammar_rate:
        return None
    fewest = rng.randint(1, 20)
    return f"{rng.randint(1, 5)} {fewest} {fewest + rng.randint(0, 40)}"
