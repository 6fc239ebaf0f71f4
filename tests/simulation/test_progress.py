"""Under pressure: more load does not bring less, and preemption takes little."""

import dataclasses
import functools

import pytest
from tests.core.harness import Harness, make_memory

from quire.core.scheduling.policy import PriorityPolicy
from quire.simulation.report import SimulationReport
from quire.simulation.simulator import run
from quire.simulation.workload import SimulationConfig

# 1,600 slots for requests of 85 tokens on average, 60 of them outputs: about 14.5 of them a second
# fit, for on the virtual clock a step takes about 25 ms with 30 rows.
CONFIG = SimulationConfig(
    seed=3,
    num_requests=300,
    num_blocks=400,
    max_num_seqs=64,
    max_num_batched_tokens=128,
    max_model_len=150,
    prompt_tokens=(10, 40),
    output_tokens=(20, 100),
    num_branches=(1, 1),
    shared_prefix_rate=0.0,
    abort_rate=0.0,
    logprobs_rate=0.0,
    stop_rate=0.0,
    end_rate=0.002,
    max_num_waiting=10_000,
    check_every=100,
)
JUST_BELOW, TWICE = 14.0, 29.0


@functools.cache
def at_load(requests_per_s: float, **options: object) -> SimulationReport:
    return run(dataclasses.replace(CONFIG, requests_per_s=requests_per_s, **options))  # type: ignore[arg-type]


def output_tokens_per_s(report: SimulationReport) -> float:
    return report.num_output_tokens / report.virtual_s


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair"])
def test_at_twice_the_load_that_fits_throughput_stays(policy: str) -> None:
    below, twice = at_load(JUST_BELOW, policy=policy), at_load(TWICE, policy=policy)
    assert below.max_num_waiting < 40 < 80 < twice.max_num_waiting
    assert output_tokens_per_s(twice) > 0.9 * output_tokens_per_s(below)
    assert sum(twice.finished.values()) == 300


def test_preemptions_are_rare_under_first_come_first_served() -> None:
    """Admission weighs how much those that run will still grow."""
    twice = at_load(TWICE, policy="fcfs")
    assert twice.num_preemptions < 0.1 * twice.num_requests
    assert twice.num_recomputed_tokens < 0.05 * twice.num_output_tokens


@pytest.mark.parametrize(("caching", "share"), [(False, 0.25), (True, 0.6)])
def test_short_bursts_cost_long_sequences_a_fraction(caching: bool, share: float) -> None:
    """Short requests outrank long ones in a full pool: tails are enough for them. With the cache,
    most of what was taken whole is still there when it is wanted back."""
    tails, all_blocks = (
        recomputed_tokens(caching=caching, preempts_whole=takes_all) for takes_all in (False, True)
    )
    print(f"caching {caching}: {tails} tokens recomputed, {all_blocks} if all blocks are taken")
    assert 0 < tails < share * all_blocks


def recomputed_tokens(*, caching: bool, preempts_whole: bool) -> int:
    """Three long sequences fill the pool, and every six steps a short one comes."""
    harness = Harness(
        make_memory(num_blocks=66, caching=caching, preempts_whole=preempts_whole),
        max_num_seqs=8,
        policy=PriorityPolicy(),
    )
    for index in range(3):
        harness.add(f"long-{index}", 80, 60, priority=5)
    for num_steps in range(70):
        if num_steps % 6 == 3:
            harness.add(f"short-{num_steps}", 8, 4)
        harness.step()
    harness.run()
    return harness.scheduler.running_set.stats.num_recomputed_tokens


@pytest.mark.parametrize("overlap", [0, 1])
def test_a_pool_that_the_longest_just_fits_into_is_enough(overlap: int) -> None:
    """No livelock, whatever wants blocks; a run raises after 1,000 steps without a token."""
    config = SimulationConfig(
        num_requests=60,
        num_blocks=18,
        policy="priority",
        arrivals="at_once",
        overlap=overlap,
        num_branches=(1, 4),
        beam_rate=0.3,
        near_rate=0.3,
    )
    report = run(config)
    assert report.num_preemptions > 20
    assert sum(report.finished.values()) == report.num_sequences > 60
