"""Each allocator carries the same load to its end; paging carries more of it at once."""

import math
from dataclasses import replace

import pytest
from benchmarks.memory.load import Budget, MemoryLoad, draw_lengths
from benchmarks.memory.step_cost import StepCost
from benchmarks.memory.study import Carried, carry, run_engine, simulate, simulated_engine

from quire.bench.baselines.contiguous import KV_ALLOCATORS
from quire.bench.workload import BenchRequest
from quire.errors import ConfigurationError, RequestNeverFitsError

LOAD = MemoryLoad(num_prompts=70, requests_per_s=math.inf)
SMALL = MemoryLoad(8, 20, 10, requests_per_s=math.inf, max_model_len=128)


@pytest.fixture(scope="module")
def carried() -> dict[str, Carried]:
    """The published set-up, with few requests that all come at once."""
    return {name: simulate(name, LOAD, Budget(), "buddy", StepCost()) for name in KV_ALLOCATORS}


def test_more_requests_run_at_once_the_less_is_reserved(carried: dict[str, Carried]) -> None:
    running = [carried[name].use.mean_running for name in KV_ALLOCATORS]
    assert running == sorted(running)
    assert carried["contiguous_max"].use.most_running == 7  # 15,700 slots of 2,048
    assert running[-1] > 2 * running[-2]
    rates = [carried[name].use.output_tokens_per_s for name in KV_ALLOCATORS]
    assert rates == sorted(rates)


def test_paging_leaves_little_unused(carried: dict[str, Carried]) -> None:
    for name, outcome in carried.items():
        assert sum(outcome.use.shares.values()) == pytest.approx(1)
        assert (outcome.use.useful_share > 0.96) == (name == "paged")
    assert carried["paged"].use.shares["internal"] == 0
    assert carried["contiguous_max"].use.shares["internal"] > 0.5
    assert carried["contiguous_oracle"].use.shares["reserved"] > 0.2


def test_a_lone_request_takes_the_time_that_its_steps_cost() -> None:
    cost = StepCost(base_s=1.0, token_s=0.0, context_token_s=0.0)
    engine, clock = simulated_engine("paged", 128, Budget(), cost=cost)
    outcome = carry(engine, [BenchRequest(0, [7] * 30, 10)], [5.0], clock)
    assert outcome.num_steps == 10 and outcome.duration_s == pytest.approx(10.0)
    assert outcome.seconds_per_token == pytest.approx(1.0)
    assert not outcome.use.is_steady
    assert outcome.use.mean_running == pytest.approx(10 / 15)  # five seconds were idle


def test_requests_come_when_they_arrive() -> None:
    cost = StepCost(base_s=1.0, token_s=0.0, context_token_s=0.0)
    engine, clock = simulated_engine("paged", 128, Budget(), cost=cost)
    requests = [BenchRequest(index, [index] * 30, 4) for index in range(3)]
    outcome = carry(engine, requests, [0.0, 2.5, 100.0], clock)
    assert outcome.use.most_running == 2
    # From the end of the first, at 4 s, to the arrival of the last: one until 7 s, then none.
    assert outcome.use.is_steady and outcome.use.measured_s == pytest.approx(96.0)
    assert outcome.use.mean_running == pytest.approx(3 / 96)
    assert outcome.duration_s == pytest.approx(104.0) and clock() == pytest.approx(104.0)
    waits = 0.5  # of the second, until the step under way has ended
    assert outcome.seconds_per_token == pytest.approx((4 + 4 + waits + 4) / 3 / 4)


def test_the_same_load_gives_the_same_figures() -> None:
    budget = Budget(num_slots=800, max_num_seqs=8)
    first, second = (simulate("paged", SMALL, budget, "buddy", StepCost()) for _ in range(2))
    assert first == second


def test_first_fit_wastes_less_on_rounding_than_buddy() -> None:
    load = replace(LOAD, num_prompts=40)
    buddy, first_fit = (
        simulate("contiguous_oracle", load, Budget(), placement, StepCost()).use
        for placement in ("buddy", "first_fit")
    )
    assert first_fit.shares["internal"] < 0.05 < buddy.shares["internal"]
    assert first_fit.mean_running > buddy.mean_running


@pytest.mark.parametrize("allocator", KV_ALLOCATORS)
def test_the_engine_carries_it_on_each_allocator(allocator: str) -> None:
    budget = Budget(num_slots=24 * 16, max_num_seqs=8, max_num_batched_tokens=256)
    outcome = run_engine(allocator, SMALL, budget, {"dtype": "float32"})
    num_tokens = sum(output for _, output in draw_lengths(SMALL))
    assert outcome.num_steps >= max(output for _, output in draw_lengths(SMALL))
    assert outcome.duration_s > 0 and outcome.seconds_per_token > 0
    assert outcome.use.output_tokens_per_s * outcome.use.measured_s <= num_tokens + 1e-6
    most = {"contiguous_max": 3}.get(allocator, 8)
    assert outcome.use.most_running <= most
    assert sum(outcome.use.shares.values()) == pytest.approx(1)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"num_slots": 15}, "num_slots is 15, but must hold a block of 16 tokens"),
        ({"block_size": 0}, "block_size is 0"),
        ({"max_num_seqs": 0}, "max_num_seqs is 0"),
        ({"num_slots": 1600}, "needs 128 adjacent KV blocks"),
    ],
)
def test_a_budget_too_small_for_any_request_is_refused(options: dict[str, int], text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        simulate("contiguous_max", LOAD, Budget(**options), "buddy", StepCost())


def test_a_request_beyond_the_pool_is_refused() -> None:
    load = MemoryLoad(4, 500, 500, sigma=0.0)
    with pytest.raises(RequestNeverFitsError, match="but the pool has 40"):
        simulate("paged", load, Budget(num_slots=640), "buddy", StepCost())
