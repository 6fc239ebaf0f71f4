"""Pauses after failures, a day's bytes, and what is predicted of loads."""

import math
import random
import threading
import time

import pytest

from quire.tiers.disk.io_limits import DAY_S, DayBudget, Health, IoPace, Spent
from quire.tiers.disk.load_rate import GUESSED_BYTES_PER_S, LoadRate


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def test_pauses_grow_and_end(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    health = Health("loads", clock)
    pauses = []
    for _ in range(9):
        assert not health.is_paused
        health.failed(OSError("broken"))
        begun_s = clock.now_s
        health.failed(OSError("another that was under way"))
        while health.is_paused:
            clock.now_s += 0.5
        pauses.append(clock.now_s - begun_s)
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    assert len(caplog.records) == 1 and "loads: paused: broken" in caplog.text
    health.record_success()
    assert not health.is_paused and health.num_failures == 18
    health.failed(OSError("again"))
    clock.now_s += 1.0
    assert not health.is_paused, "after it worked, the first pause is short again"


def test_an_operation_that_works_does_not_end_a_pause() -> None:
    health = Health("loads", Clock())
    health.failed(OSError("broken"))
    health.record_success()
    assert health.is_paused


@pytest.mark.parametrize("seed", range(5))
def test_no_day_has_more_bytes_than_its_budget(seed: int) -> None:
    random_source, clock = random.Random(seed), Clock()
    budget = DayBudget(1_000_000, clock)
    written: list[tuple[float, int]] = []
    while clock.now_s < 4 * DAY_S:
        size = random_source.randrange(1, 30_000)
        if random_source.random() < 0.5 and budget.spend(size):
            written.append((clock.now_s, size))
        clock.now_s += random_source.expovariate(1 / 300)
    for begin_s, _ in written:
        day = [size for at_s, size in written if begin_s <= at_s < begin_s + DAY_S]
        assert sum(day) <= 1_000_000
    assert sum(size for _, size in written) > 0.7 * 4 * 1_000_000


def test_the_wait_for_a_day_budget_is_what_it_takes() -> None:
    clock = Clock()
    budget = DayBudget(4_000, clock)
    assert budget.spend(1_000) and not budget.spend(10)
    clock.now_s += budget.wait_s(10) + 1e-6
    assert budget.spend(10) and not budget.spend(10)
    assert math.isfinite(budget.wait_s(5_000)), "more than a burst is never to be had"
    assert DayBudget(None, clock).spend(1 << 60) and DayBudget(None, clock).wait_s(1) == 0


class Ledger:
    """Keeps what was spent; broken: it can't."""

    spent: Spent | None = None
    broken: OSError | None = None
    num_writes = 0

    def read_spent(self) -> Spent | None:
        return self.spent

    def write_spent(self, spent: Spent) -> None:
        if self.broken is not None:
            raise self.broken
        self.spent, self.num_writes = spent, self.num_writes + 1


@pytest.mark.parametrize("ends_cleanly", [True, False])
def test_processes_in_turn_have_one_budget(ends_cleanly: bool) -> None:
    clock, ledger, num_taken = Clock(), Ledger(), 0
    for _ in range(200):  # a loop of restarts
        budget = DayBudget(1_000_000, clock, ledger, clock)
        for _ in range(3):
            num_taken += 1_000 * budget.spend(1_000)
        if ends_cleanly:
            budget.close()
    # What was kept ahead is lost with a process that is killed: most of what may be written.
    assert (200_000 if ends_cleanly else 20_000) <= num_taken <= 250_000
    clock.now_s += DAY_S
    budget = DayBudget(1_000_000, clock, ledger, clock)
    assert sum(1_000 * budget.spend(1_000) for _ in range(300)) == 250_000
    assert ledger.num_writes < 1_000


def test_a_calendar_that_was_set_back_gives_no_bytes() -> None:
    clock, ledger = Clock(), Ledger()
    ledger.spent = Spent(250_000, clock.now_s + 1e6)
    assert not DayBudget(1_000_000, clock, ledger, clock).spend(1)


def test_nothing_is_taken_that_the_ledger_can_not_keep() -> None:
    clock, ledger = Clock(), Ledger()
    budget = DayBudget(1_000_000, clock, ledger, clock)
    ledger.broken = OSError("full")
    with pytest.raises(OSError, match="full"):
        budget.spend(1_000)
    ledger.broken = None
    assert budget.spend(250_000)


def beside_steps() -> IoPace:
    """A pace with a long debt, of an engine that asks again and again."""
    pace = IoPace()
    pace.asked()
    pace.asked()
    pace.used(3600.0, pace.wait_turn(0.0))
    return pace


def test_an_engine_that_waits_gets_what_it_waits_for_at_once() -> None:
    pace = IoPace()
    for _ in range(3):
        pace.asked()
        assert not pace.is_beside_steps
        pace.used(3600.0, pace.wait_turn(3600.0))  # returns, whatever was used before
        pace.waits()


def test_beside_steps_nothing_begins_until_its_time_or_its_patience_is_over() -> None:
    pace = beside_steps()
    assert pace.is_beside_steps
    before_s = time.monotonic()
    pace.wait_turn(0.02)
    assert time.monotonic() - before_s >= 0.02


def test_throttled_writes_begin_when_the_engine_waits() -> None:
    pace = beside_steps()
    held = threading.Thread(target=pace.wait_turn, args=(3600.0,), daemon=True)
    held.start()
    held.join(0.01)
    assert held.is_alive()
    pace.waits()
    held.join(60.0)
    assert not held.is_alive()


@pytest.mark.parametrize("bytes_per_s", [5e6, 100e6, 3e9])
def test_bandwidth_and_latency_are_learned(bytes_per_s: float) -> None:
    rate, now_s = LoadRate(), 0.0
    for _ in range(400):
        took_s = 2e-3 + (1 << 20) / bytes_per_s
        rate.begun(now_s)
        now_s += took_s
        rate.ended(now_s, took_s, 1 << 20)
        now_s += 0.1  # between reads nothing is learned
    wanted_s = 64 * (2e-3 + (1 << 20) / bytes_per_s)
    assert rate.speed(now_s).seconds(64 << 20) == pytest.approx(wanted_s, rel=0.1)


def test_readers_beside_each_other_are_one_stream() -> None:
    rate, now_s = LoadRate(), 0.0
    rate.begun(now_s)
    for _ in range(400):
        rate.begun(now_s)
        now_s += 0.001
        rate.ended(now_s, 0.002, 1 << 20)
    assert rate.bytes_per_s == pytest.approx((1 << 20) / 0.001, rel=0.05)


def test_a_learned_rate_is_forgotten_slowly() -> None:
    rate = LoadRate()
    rate.begun(0.0)
    rate.ended(1000.0, 1000.0, 1 << 30)
    slow_s = rate.speed(1000.0).seconds(1 << 20)
    assert slow_s > 0.5
    assert rate.speed(1300.0).seconds(1 << 20) < 0.1 * slow_s
    guessed_s = (1 << 20) / GUESSED_BYTES_PER_S
    assert rate.speed(1e6).seconds(1 << 20) == pytest.approx(guessed_s + rate.latency_s, rel=0.01)
