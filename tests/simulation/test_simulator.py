"""The real scheduler and memory over a fixed set of seeds: every law, every step."""

import dataclasses
from typing import Any

import pytest

from quire.core.request import Request
from quire.core.scheduling import scheduler as scheduler_module
from quire.core.scheduling import step_results as results
from quire.core.scheduling.policy import POLICIES
from quire.core.scheduling.scheduler import Scheduler
from quire.engine import engine as engine_module
from quire.engine.engine import Engine
from quire.simulation.report import SimulationReport, add_up
from quire.simulation.simulator import SimulationError, run
from quire.simulation.workload import SimulationConfig
from quire.simulation.worlds import draw_world

NUM_WORLDS = 24
NUM_STEPS = 60


def world(index: int) -> SimulationConfig:
    return draw_world(0, index, NUM_STEPS, check_every=3)


@pytest.fixture(scope="module")
def reports() -> list[SimulationReport]:
    return [run(world(index)) for index in range(NUM_WORLDS)]


def test_all_laws_hold_in_all_worlds(reports: list[SimulationReport]) -> None:
    for report in reports:
        assert report.num_steps >= NUM_STEPS
        assert sum(report.finished.values()) == report.num_sequences
        assert sum(report.aborted_in.values()) <= report.finished.get("abort", 0)
        assert sum(report.served_tokens.values()) == report.num_output_tokens


def test_the_worlds_reach_every_state(reports: list[SimulationReport]) -> None:
    """A set of worlds in which nothing happens would prove nothing."""
    total = add_up(reports, seed=0)
    assert set(total.finished) == {"stop", "length", "abort", "error"}
    assert set(total.aborted_in) >= {"waiting", "running", "running in flight", "preempted"}
    assert set(total.misses) >= {"none", "evicted", "differs", "below_block", "other_domain"}
    at_least = {
        "num_preemptions": 120,
        "num_recomputed_tokens": 400,
        "num_hit_tokens": 2000,
        "num_evicted_blocks": 2000,
        "num_failed_steps": 40,
        "num_refused": 20,
        "num_forks": 40,
        "num_joined_forks": 24,
        "num_beams": 16,
        "num_constrained": 80,
        "num_cow_blocks": 200,
        "num_partial_hits": 80,
        "num_crashes": 2,
        "num_resumed": 8,
        "num_interrupts": 8,
    }
    reached = {name: getattr(total, name) for name in at_least}
    assert all(reached[name] > least for name, least in at_least.items()), reached


@pytest.mark.parametrize("seed", [0, 3, 11])
def test_a_seed_replays_exactly(seed: int, reports: list[SimulationReport]) -> None:
    again = run(world(seed))
    assert again == reports[seed]
    assert again.digest and again.digest != reports[seed + 12].digest


def test_checking_less_often_changes_nothing_else() -> None:
    often = run(SimulationConfig(num_requests=30))
    seldom = run(SimulationConfig(num_requests=30, check_every=50))
    assert often == seldom


@pytest.mark.parametrize("overlap", [0, 1])
def test_a_long_run(overlap: int) -> None:
    config = SimulationConfig(
        num_steps=700,
        overlap=overlap,
        check_every=10,
        abort_rate=0.2,
        num_branches=(1, 3),
        beam_rate=0.2,
        fork_rate=0.1,
        requests_per_s=40.0,
        max_num_waiting=20,
    )
    report = run(config)
    assert report.num_steps >= 700
    assert report.num_preemptions > 0 and report.max_num_running == 8
    assert report.virtual_s > 700 * 0.01


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


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_overlap_changes_no_answer(policy: str) -> None:
    """Without aborts the same requests end the same way, however the steps are planned."""
    config = SimulationConfig(
        num_requests=30, abort_rate=0.0, policy=policy, nan_rate=0.1, beam_rate=0.3, near_rate=0.3
    )
    one, other = run(config), run(dataclasses.replace(config, overlap=1))
    assert one.finished == other.finished
    assert one.num_output_tokens == other.num_output_tokens
    assert one.digest != other.digest


def test_a_poison_request_harms_no_other_request() -> None:
    config = SimulationConfig(num_requests=60, poison_rate=0.2, abort_rate=0.0)
    report = run(config)
    assert report.finished["error"] >= 5
    assert report.num_failed_steps >= 2 * report.finished["error"] * 0.5


def broken_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    original = results.extend

    def extend(*arguments: Any) -> Any:
        output = original(*arguments)
        return output._replace(token_ids=[*output.token_ids[:-1], 7])

    monkeypatch.setattr(scheduler_module, "extend", extend)


def lost_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Engine.step

    def step(self: Engine) -> Any:
        return [output for output in original(self) if not output.finish_reason]

    monkeypatch.setattr(Engine, "step", step)


def lost_logprobs(monkeypatch: pytest.MonkeyPatch) -> None:
    original = results.extend
    monkeypatch.setattr(
        scheduler_module, "extend", lambda *given: original(*given)._replace(logprobs=None)
    )


def refused_without_need(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Scheduler.add

    def add(self: Scheduler, branches: Any, now_s: float) -> None:
        branches[0].max_num_tokens += 500
        original(self, branches, now_s)

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
    with pytest.raises(SimulationError, match=rf"(?s)^seed 9, after \d+ steps: .*({message})"):
        run(SimulationConfig(seed=9, num_requests=40, logprobs_rate=0.5))


# ---- crashes ------------------------------------------------------------------------------------

CRASHES = SimulationConfig(
    num_requests=60,
    crash_rate=0.08,
    num_branches=(1, 4),
    beam_rate=0.15,
    logprobs_rate=0.5,
    near_rate=0.3,
    repeat_rate=0.2,
    deadline_rate=0.3,
)


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_no_client_notices_a_crash(policy: str) -> None:
    overlap = sorted(POLICIES).index(policy) % 2
    config = dataclasses.replace(
        CRASHES,
        seed=7 + overlap,
        policy=policy,
        overlap=overlap,
        fork_rate=0.1,
        step_failure_rate=0.01,
        nan_rate=0.05,
        block_size=2 + 2 * overlap,
        num_groups=1 + overlap,
        num_blocks=96,
    )
    report = run(config)
    assert report.num_crashes >= 5 and report.num_resumed >= 30
    assert sum(report.finished.values()) == report.num_sequences
    assert sum(report.served_tokens.values()) == report.num_output_tokens


@pytest.mark.parametrize("seed", range(2))
def test_crashes_change_no_answer(seed: int) -> None:
    calm = dataclasses.replace(CRASHES, seed=seed, crash_rate=0.0, abort_rate=0.0)
    one, other = run(calm), run(dataclasses.replace(calm, crash_rate=0.1))
    assert other.num_crashes >= 5
    assert one.finished == other.finished
    assert one.num_output_tokens == other.num_output_tokens


def repeated_token(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Request.resume

    def resume(self: Request, branches: Any, **more: Any) -> Request:
        return original(self, {key: ids[:-1] for key, ids in branches.items()}, **more)

    monkeypatch.setattr(Request, "resume", resume)


def longer_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was generated before does not count against max_tokens."""
    original = engine_module.make_sequences

    def make_sequences(*arguments: Any) -> Any:
        groups = original(*arguments)
        for sequence in (one for group in groups for one in group):
            sequence.max_num_tokens += sequence.num_output_tokens
        return groups

    monkeypatch.setattr(engine_module, "make_sequences", make_sequences)


@pytest.mark.parametrize(
    ("break_it", "message"),
    [(repeated_token, "got .* not"), (longer_limit, "is to be resumed after")],
)
def test_a_resumption_that_goes_wrong_is_found(
    break_it: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_it(monkeypatch)
    with pytest.raises(SimulationError, match=rf"(?s)after \d+ steps: .*({message})"):
        run(dataclasses.replace(CRASHES, seed=3, end_rate=0.0))


def test_a_seed_replays_its_crashes() -> None:
    report = run(CRASHES)
    assert report.num_crashes > 0
    assert run(CRASHES) == report
