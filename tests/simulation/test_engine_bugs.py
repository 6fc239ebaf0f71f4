"""Faults, interrupts and crashes of a simulated engine, and bugs planted in its loop."""

import dataclasses
from typing import Any

import pytest

from quire.core.scheduling.scheduler import Scheduler
from quire.engine.engine import Engine
from quire.engine.step_clock import StepClock
from quire.simulation.report import SimulationReport
from quire.simulation.simulator import SimulationError, run
from quire.simulation.workload import SimulationConfig

CONFIG = SimulationConfig(
    seed=4,
    num_requests=40,
    num_blocks=30,
    num_branches=(1, 3),
    beam_rate=0.2,
    fork_rate=0.1,
    near_rate=0.3,
    end_rate=0.1,
    abort_rate=0.15,
    logprobs_rate=0.3,
    check_every=2,
)
FAULTS: dict[str, Any] = {
    "step_failure_rate": 0.02,
    "nan_rate": 0.1,
    "poison_rate": 0.05,
    "interrupt_rate": 0.01,
}


def of_clients(report: SimulationReport) -> tuple[Any, ...]:
    return report.finished, report.num_output_tokens, report.num_answered


@pytest.mark.parametrize("seed", range(3))
def test_overlap_and_faults_change_no_answer(seed: int) -> None:
    config = dataclasses.replace(CONFIG, seed=seed, abort_rate=0.0, fork_rate=0.0)
    ahead = dataclasses.replace(config, overlap=1)
    one, other = run(config), run(ahead)
    assert of_clients(one) == of_clients(other)
    assert other.virtual_s < one.virtual_s + 1.0, "a step more now and then, for what has ended"
    interrupted = run(dataclasses.replace(ahead, interrupt_rate=0.02))
    assert interrupted.num_interrupts > 5
    assert of_clients(interrupted) == of_clients(one)


@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("seed", range(3))
def test_the_laws_hold_with_faults_and_aborts(seed: int, overlap: int) -> None:
    config = dataclasses.replace(
        CONFIG, seed=seed, overlap=overlap, num_groups=1 + overlap, num_blocks=64, **FAULTS
    )
    report = run(config)
    assert report.num_failed_steps > 5 and report.num_interrupts > 0
    assert set(report.finished) == {"abort", "error", "length", "stop"}
    assert sum(report.finished.values()) == report.num_sequences
    assert run(config) == report


def test_crashes_and_interrupts_change_no_answer() -> None:
    """Forks go on in the next engine as requests of their own."""
    config = dataclasses.replace(CONFIG, abort_rate=0.0, fork_rate=0.2, crash_rate=0.05)
    report = run(dataclasses.replace(config, overlap=1, interrupt_rate=0.01))
    assert report.num_crashes > 5 and report.num_interrupts > 0
    assert report.num_resumed > 20 and report.num_forks > 20
    assert set(report.finished) <= {"length", "stop", "error"}
    assert sum(report.finished.values()) == report.num_sequences


# ---- planted bugs -------------------------------------------------------------------------------


def keeps_steps_of_a_failed_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepClock, "drop", lambda self: None)


def forgets_to_reset_the_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    def drop_steps(self: Engine, message: str | None) -> Any:
        self._in_flight.drop()
        return self.scheduler.recover(message)

    monkeypatch.setattr(Engine, "_drop_steps", drop_steps)


def drops_only_the_last_step(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Scheduler.recover

    def recover(self: Scheduler, message: str | None) -> Any:
        first = self._in_flight.popleft() if len(self._in_flight) > 1 else None
        found = original(self, message)
        if first is not None:
            self._in_flight.append(first)
        return found

    monkeypatch.setattr(Scheduler, "recover", recover)


def never_forgets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Engine, "_forget_if_finished", lambda self, request_id: None)


def loses_the_outputs_of_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Engine._drop_steps

    def drop_steps(self: Engine, message: str | None) -> list[Any]:
        original(self, message)
        return []

    monkeypatch.setattr(Engine, "_drop_steps", drop_steps)


def takes_a_bug_for_a_failed_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not of the engine: what the device's model raises by itself must not be recovered from."""

    def refuse(self: Any, *_: Any) -> None:
        raise ValueError("a shape that is wrong")

    monkeypatch.setattr("quire.simulation.plan_rows.PlanRows.edit_table", refuse)


@pytest.mark.parametrize(
    ("plant", "message"),
    [
        (keeps_steps_of_a_failed_runner, None),
        (forgets_to_reset_the_runner, "without a reset|before the last one was sampled"),
        (drops_only_the_last_step, None),
        (never_forgets, "is in use|remembers requests"),
        (loses_the_outputs_of_failures, "never answered|has ended or never existed"),
        (takes_a_bug_for_a_failed_step, "ValueError: a shape that is wrong"),
    ],
)
def test_a_planted_bug_is_found(
    plant: Any, message: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    config = dataclasses.replace(CONFIG, overlap=1, **FAULTS)
    with pytest.raises((SimulationError, IndexError), match=message):
        run(config)
