"""The real scheduler and memory over a fixed set of seeds: every law, every step."""

import dataclasses
import random
from collections import Counter
from typing import Any

import pytest

from quire.core import scheduler as scheduler_module
from quire.core.scheduler import Scheduler
from quire.simulation.simulator import SimulationError, SimulationReport, run
from quire.simulation.workload import SimulationConfig

SEEDS = range(120)


def config_of(seed: int) -> SimulationConfig:
    """A small world drawn from its seed; overlap and policy take turns, so all pairs come."""
    rng = random.Random(seed)
    return SimulationConfig(
        seed=seed,
        num_requests=30,
        overlap=seed % 2,
        policy=("fcfs", "priority")[seed // 2 % 2],
        num_groups=1 + seed // 4 % 3,
        num_blocks=rng.choice([12, 20, 40, 64]),
        block_size=rng.choice([1, 2, 4, 8]),
        max_num_seqs=rng.choice([1, 2, 4, 8, 16]),
        max_num_batched_tokens=rng.choice([16, 17, 32, 64]),
        enable_prefix_caching=rng.random() < 0.8,
        arrivals=rng.choice(["poisson", "bursts", "at_once"]),
        requests_per_s=rng.choice([10.0, 30.0, 100.0]),
        abort_rate=rng.choice([0.0, 0.2, 0.5]),
        step_failure_rate=rng.choice([0.0, 0.0, 0.05]),
        poison_rate=rng.choice([0.0, 0.0, 0.1]),
        nan_rate=rng.choice([0.0, 0.0, 0.1]),
        logprobs_rate=rng.choice([0.0, 0.3]),
    )


@pytest.fixture(scope="module")
def reports() -> list[SimulationReport]:
    return [run(config_of(seed)) for seed in SEEDS]


def test_all_laws_hold_over_all_seeds(reports: list[SimulationReport]) -> None:
    for report in reports:
        assert report.num_requests == 30
        assert sum(report.finished.values()) == report.num_sequences
        assert sum(report.aborted_in.values()) == report.finished.get("abort", 0)


def test_the_seeds_reach_every_state(reports: list[SimulationReport]) -> None:
    """A set of seeds in which nothing happens would prove nothing."""
    ends, aborts = Counter[str](), Counter[str]()
    for report in reports:
        ends.update(report.finished)
        aborts.update(report.aborted_in)
    assert set(ends) == {"stop", "length", "abort", "error"}
    assert set(aborts) >= {"waiting", "running", "running in flight", "preempted"}
    assert sum(report.num_preemptions for report in reports) > 500
    assert sum(report.num_hit_tokens for report in reports) > 1000
    assert sum(report.num_evicted_blocks for report in reports) > 1000
    assert sum(report.num_failed_steps for report in reports) > 100
    assert sum(report.num_refused for report in reports) > 100


@pytest.mark.parametrize("seed", [0, 1, 2, 3, 7, 11])
def test_a_seed_replays_exactly(seed: int, reports: list[SimulationReport]) -> None:
    again = run(config_of(seed))
    assert again == reports[seed]
    assert again.digest and again.digest != reports[seed + 12].digest


def test_checking_less_often_changes_nothing_else() -> None:
    often = run(SimulationConfig(num_requests=30))
    seldom = run(SimulationConfig(num_requests=30, check_every=50))
    assert often == seldom


@pytest.mark.parametrize("overlap", [0, 1])
def test_a_long_run(overlap: int) -> None:
    config = SimulationConfig(num_steps=1500, overlap=overlap, check_every=10, abort_rate=0.2)
    report = run(config)
    assert report.num_steps >= 1500
    assert report.num_preemptions > 0 and report.max_num_running == 8
    assert report.virtual_s > 1500 * 0.01


def test_a_step_limit_ends_the_arrivals_not_the_requests() -> None:
    report = run(SimulationConfig(num_steps=50))
    assert report.num_steps >= 50
    assert report.num_requests < 100
    assert sum(report.finished.values()) == report.num_sequences


def test_idle_time_passes_on_the_virtual_clock() -> None:
    report = run(SimulationConfig(num_requests=5, requests_per_s=0.01))
    assert report.virtual_s > 50
    assert report.max_num_running <= 2
    assert report.steps_per_s > 0


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_overlap_changes_no_answer(policy: str) -> None:
    """Without aborts the same requests end the same way, however the steps are planned."""
    config = SimulationConfig(num_requests=40, abort_rate=0.0, policy=policy, nan_rate=0.1)
    one, other = run(config), run(dataclasses.replace(config, overlap=1))
    assert one.finished == other.finished
    assert one.num_output_tokens == other.num_output_tokens
    assert one.digest != other.digest


def test_a_poison_request_harms_nobody_else() -> None:
    config = SimulationConfig(num_requests=60, poison_rate=0.2, abort_rate=0.0)
    report = run(config)
    assert report.finished["error"] >= 5
    assert report.num_failed_steps >= 2 * report.finished["error"] * 0.5


def broken_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    original = scheduler_module._extend

    def extend(*arguments: Any) -> Any:
        output = original(*arguments)
        return output._replace(token_ids=[*output.token_ids[:-1], 7])

    monkeypatch.setattr(scheduler_module, "_extend", extend)


def lost_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Scheduler.apply

    def apply(self: Scheduler, result: Any) -> Any:
        return [output for output in original(self, result) if not output.finish_reason]

    monkeypatch.setattr(Scheduler, "apply", apply)


def lost_logprobs(monkeypatch: pytest.MonkeyPatch) -> None:
    original = scheduler_module._extend
    monkeypatch.setattr(
        scheduler_module, "_extend", lambda *given: original(*given)._replace(logprobs=None)
    )


def refused_without_need(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Scheduler.add

    def add(self: Scheduler, sequence: Any, now_s: float) -> None:
        sequence.max_num_tokens += 500
        original(self, sequence, now_s)

    monkeypatch.setattr(Scheduler, "add", add)


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (broken_answer, "got .* not"),
        (lost_answer, "never answered"),
        (lost_logprobs, "log-probabilities None, not"),
        (refused_without_need, "was refused, but needs only"),
    ],
)
def test_a_broken_promise_to_a_client_is_found(
    break_it: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_it(monkeypatch)
    with pytest.raises(SimulationError, match=rf"(?s)^seed 9, after \d+ steps: .*{message}"):
        run(SimulationConfig(seed=9, num_requests=40, logprobs_rate=0.5))
