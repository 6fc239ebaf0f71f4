"""What a seed draws, and which configurations are refused."""

import itertools
import random
from typing import Any

import pytest

from quire.core.memory.prefix_cache import PUBLIC_DOMAIN
from quire.core.sampling_params import DecodingParams
from quire.errors import ConfigurationError
from quire.simulation.workload import Arrival, SimulationConfig, draw_arrivals, draw_fork


def draw(count: int = 300, **options: Any) -> list[Arrival]:
    return list(draw_arrivals(SimulationConfig(num_requests=count, **options)))


def test_a_seed_draws_the_same_again_and_another_seed_others() -> None:
    assert draw(seed=3) == draw(seed=3) != draw(seed=4)


def test_without_a_number_it_goes_on_for_ever() -> None:
    endless = draw_arrivals(SimulationConfig(num_steps=5))
    assert len(list(itertools.islice(endless, 500))) == 500
    assert len(list(draw_arrivals(SimulationConfig()))) == 100


def test_lengths_are_within_their_bounds_and_leave_room() -> None:
    arrivals = draw(prompt_tokens=(3, 50), output_tokens=(2, 9), max_model_len=40)
    lengths = {len(arrival.request.prompt_token_ids) for arrival in arrivals}
    assert (min(lengths), max(lengths)) == (3, 39)
    assert {arrival.request.params.max_tokens for arrival in arrivals} == set(range(2, 10))
    assert all(
        arrival.request.params.min_tokens <= arrival.request.params.max_tokens
        for arrival in arrivals
    )


@pytest.mark.parametrize(("rate", "low", "high"), [(0.0, 0, 0), (0.5, 120, 180), (1.0, 300, 300)])
def test_shared_prefixes_are_as_frequent_as_asked(rate: float, low: int, high: int) -> None:
    arrivals = draw(shared_prefix_rate=rate, prompt_tokens=(8, 8))
    heads = [tuple(arrival.request.prompt_token_ids[:5]) for arrival in arrivals]
    shared = sum(heads.count(head) > 1 for head in heads)
    assert low <= shared <= high


@pytest.mark.parametrize("arrivals", ["poisson", "bursts", "at_once"])
def test_times_go_forward(arrivals: str) -> None:
    times = [arrival.at_s for arrival in draw(arrivals=arrivals)]
    assert times == sorted(times)
    distinct = {"poisson": 300, "bursts": 38, "at_once": 1}[arrivals]
    assert len(set(times)) == distinct
    if arrivals != "at_once":
        assert 8 < times[-1] < 25  # 300 requests at 20 a second


def test_faults_are_drawn_as_often_as_asked() -> None:
    config = SimulationConfig()
    arrivals = draw(poison_rate=0.2, nan_rate=0.3, abort_rate=0.4, logprobs_rate=0.5)
    last = [arrival.request.prompt_token_ids[-1] for arrival in arrivals]
    assert 40 < last.count(config.poison_token_id) < 80
    assert 65 < last.count(config.nan_token_id) < 115
    assert 90 < sum(arrival.abort_age_steps is not None for arrival in arrivals) < 150
    assert 110 < sum(arrival.request.params.logprobs is not None for arrival in arrivals) < 190


def test_domains_and_priorities_are_all_used() -> None:
    arrivals = draw(num_cache_domains=3, num_priorities=4)
    assert {arrival.request.cache_domain for arrival in arrivals} == {
        f"domain-{at}" for at in range(3)
    }
    assert {arrival.request.priority for arrival in arrivals} == {0, 1, 2, 3}


def test_branches_beams_tenants_and_deadlines_are_drawn_as_asked() -> None:
    arrivals = draw(num_branches=(1, 4), beam_rate=0.3, deadline_rate=0.5, public_rate=0.2)
    requests = [request.request for request in arrivals]
    beams = [request for request in requests if request.params.beam_width]
    assert 60 < len(beams) < 125 and {request.n for request in beams} == {2, 3, 4}
    assert all(request.n == request.params.beam_width for request in beams)
    assert all(
        (request.params.logprobs, request.params.min_tokens) == (None, 0) for request in beams
    )
    assert {request.n for request in requests if not request.params.beam_width} == {1, 2, 3, 4}
    assert {request.tenant for request in requests} == {f"tenant-{at}" for at in range(3)}
    assert 110 < sum(request.deadline_s is not None for request in requests) < 190
    assert 35 < sum(request.cache_domain == PUBLIC_DOMAIN for request in requests) < 85


def test_repeated_prompts_come_with_the_one_before() -> None:
    arrivals = draw(repeat_rate=0.4, shared_prefix_rate=0.0, poison_rate=0.1)
    pairs = [
        (one, other)
        for one, other in itertools.pairwise(arrivals)
        if one.request.prompt_token_ids == other.request.prompt_token_ids
    ]
    assert 90 < len(pairs) < 150
    assert all(one.at_s == other.at_s for one, other in pairs)
    assert all(one.request.cache_domain == other.request.cache_domain for one, other in pairs)
    assert sum(one.request.params == other.request.params for one, other in pairs) == 0


def test_near_prompts_agree_up_to_any_token_but_not_in_a_fault() -> None:
    config = SimulationConfig()
    arrivals = draw(near_rate=1.0, shared_prefix_rate=0.0, prompt_tokens=(20, 30), nan_rate=0.2)
    prompts = [list(arrival.request.prompt_token_ids) for arrival in arrivals]
    common = {
        max(_num_common(prompt, other) for other in prompts[max(0, at - 16) : at])
        for at, prompt in enumerate(prompts)
        if at
    }
    assert common >= set(range(1, 20))
    assert all(token_id < config.vocab_size for prompt in prompts for token_id in prompt[:-1])


def _num_common(one: list[int], other: list[int]) -> int:
    pairs = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    return sum(1 for _ in pairs)


def test_a_fork_has_room_for_a_token_at_least() -> None:
    rng, params = random.Random(1), DecodingParams(8, seed=5)
    drawn = [draw_fork(rng, params, 7) for _ in range(100)]
    assert {fork.max_tokens for fork in drawn} == set(range(8, 13))
    assert {fork.logprobs for fork in drawn} == {None, 2}
    assert 20 < sum(fork.seed == 5 for fork in drawn) < 80


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"overlap": 2}, "overlap is 2, but must be 0 or 1"),
        ({"arrivals": "never"}, "'never', but must be one of poisson, bursts, at_once"),
        ({"arrivals": "at_once", "num_steps": 5}, "'at_once', which needs num_requests"),
        ({"check_every": 0}, "check_every is 0, but must be at least 1"),
        ({"max_num_waiting": 0}, "max_num_waiting is 0, but must be at least 1"),
        ({"num_branches": (0, 2)}, r"num_branches is \(0, 2\)"),
        ({"prompt_tokens": (5, 4)}, r"prompt_tokens is \(5, 4\), but must be 1 <= low <= high"),
        ({"output_tokens": (0, 4)}, r"output_tokens is \(0, 4\)"),
    ],
)
def test_a_config_that_makes_no_sense_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        SimulationConfig(**options)


def test_kinds_say_the_groups() -> None:
    groups = SimulationConfig(kinds="full,latent,window,window:3,state,state:4").groups
    kinds = [group.kind.value for group in groups]
    assert kinds == ["full", "latent", "window", "window", "state", "state"]
    assert [group.window for group in groups] == [None, None, 10, 3, None, None]
    assert [group.num_state_blocks for group in groups] == [0, 0, 0, 0, 2, 4]
    assert [group.layers for group in groups] == [(layer,) for layer in range(6)]
    assert len(SimulationConfig(num_groups=3).groups) == 3


@pytest.mark.parametrize(
    ("kinds", "word"),
    [
        ("full,rings", "'rings'"),
        ("full,", "''"),
        ("full:3", "'full:3'"),
        ("window:0", "'window:0'"),
        ("state:-1", "'state:-1'"),
        ("state:many", "'state:many'"),
    ],
)
def test_unknown_kinds_are_refused(kinds: str, word: str) -> None:
    with pytest.raises(ConfigurationError, match=f"but {word} is not one of full, latent"):
        SimulationConfig(kinds=kinds)


def test_snapshots_stand_at_the_ends_of_blocks() -> None:
    with pytest.raises(ConfigurationError, match="snapshot_tokens is 6, but must be whole blocks"):
        SimulationConfig(snapshot_tokens=6)
