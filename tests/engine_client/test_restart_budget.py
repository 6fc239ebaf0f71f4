"""How long an engine waits for its next start after deaths, and when it is given up."""

import dataclasses
import signal
from typing import Any

import pytest

from quire.engine_client.process.activity import Activity, Doing
from quire.engine_client.recovery import Death, RecoveryConfig, RestartBudget
from quire.errors import ConfigurationError

SEGFAULT, KILLED = -int(signal.SIGSEGV), -int(signal.SIGKILL)
COMPUTING = Activity(Doing.COMPUTING, None)

CONFIG = RecoveryConfig(max_restarts=3, window_s=100.0, first_backoff_s=0.5, max_backoff_s=1.5)


def delays(*deaths: tuple[float, set[int]], config: RecoveryConfig = CONFIG) -> list[float | None]:
    """Of deaths as (when, the numbers of those that it explains); the first has number 0."""
    budget = RestartBudget(config)
    made = [Death(COMPUTING, SEGFAULT) for _ in deaths]
    return [
        budget.note_death(now_s, death, {made[number] for number in explained})
        for death, (now_s, explained) in zip(made, deaths, strict=True)
    ]


@pytest.mark.parametrize(
    ("deaths", "expected"),
    [
        ([(0, set()), (1, set()), (2, set()), (3, set())], [0.0, 0.5, 1.0, None]),
        # Out of the window, a death counts no more.
        ([(0, set()), (50, set()), (99, set()), (100, set())], [0.0, 0.5, 1.0, 1.0]),
        ([(0, set()), (300, set()), (600, set())], [0.0, 0.0, 0.0]),
        # Who is to blame for a death is to blame for others before it, and for no more.
        ([(0, set()), (1, {1}), (2, {0, 1, 2}), (3, set()), (4, {3, 4})], [0.0] * 5),
        ([(0, set()), (1, set()), (2, {1, 2}), (3, set())], [0.0, 0.5, 0.0, 0.5]),
        ([(0, {0}), (1, {1})], [0.0, 0.0]),
    ],
)
def test_how_long_to_wait_before_the_next_start(
    deaths: list[tuple[float, set[int]]], expected: list[float | None]
) -> None:
    assert delays(*deaths) == expected


def test_kills_from_outside_end_in_a_pause_instead_of_the_end() -> None:
    def note(budget: RestartBudget, now_s: float, status: int | None) -> float | None:
        return budget.note_death(now_s, Death(COMPUTING, status, num_oom_kills=0))

    budget = RestartBudget(CONFIG)
    assert [note(budget, now_s, KILLED) for now_s in range(3)] == [0.0, 0.5, 1.0]
    assert [note(budget, now_s, KILLED) for now_s in (3, 64)] == [60.0, 60.0]
    assert [note(budget, now_s, SEGFAULT) for now_s in (65, 66, 67)] == [1.5] * 3
    assert note(budget, 68, KILLED) == 60.0
    assert note(budget, 69, SEGFAULT) is None, "four crashes of its own"

    killed_by_its_server = [note(RestartBudget(CONFIG), 0, None)]
    assert killed_by_its_server == [0.0]
    never = RestartBudget(dataclasses.replace(CONFIG, max_restarts=0))
    assert note(never, 0, KILLED) is None


def test_the_wait_is_bounded_and_no_restart_may_be_allowed() -> None:
    config = dataclasses.replace(CONFIG, max_restarts=9)
    assert delays(*((0.0, set()) for _ in range(6)), config=config)[-3:] == [1.5, 1.5, 1.5]
    assert delays((0.0, set()), config=dataclasses.replace(CONFIG, max_restarts=0)) == [None]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_restarts": -1}, "max_restarts is -1"),
        ({"window_s": 0.0}, "window_s is 0.0, but must be above 0"),
        ({"heartbeat_timeout_s": -1.0}, "heartbeat_timeout_s is -1.0"),
        ({"cooldown_s": 0.0}, "cooldown_s is 0.0, but must be above 0"),
        ({"first_backoff_s": 50.0}, "first_backoff_s is 50.0 and max_backoff_s 30.0"),
    ],
)
def test_bad_patience_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        RecoveryConfig(**options)
