"""Pauses after failures, a day's bytes, and what is predicted of loads."""

import math
import random

import pytest

from quire.tiers.disk.io_limits import DAY_S, DayBudget, Health
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
    health.worked()
    assert not health.is_paused and health.num_failures == 18
    health.failed(OSError("again"))
    clock.now_s += 1.0
    assert not health.is_paused, "after it worked, the first pause is short again"


def test_what_works_during_a_pause_does_not_end_it() -> None:
    health = Health("loads", Clock())
    health.failed(OSError("broken"))
    health.worked()
    assert health.is_paused


@pytest.mark.parametrize("seed", range(5))
def test_no_day_has_more_bytes_than_its_budget(seed: int) -> None:
    random_source, clock = random.Random(seed), Clock()
    budget = DayBudget(1_000_000, clock)
    written: list[tuple[float, int]] = []
    while clock.now_s < 4 * DAY_S:
        size = random_source.randrange(1, 30_000)
        if random_source.random() < 0.5 and budget.take(size):
            written.append((clock.now_s, size))
        clock.now_s += random_source.expovariate(1 / 300)
    for begin_s, _ in written:
        day = [size for at_s, size in written if begin_s <= at_s < begin_s + DAY_S]
        assert sum(day) <= 1_000_000
    assert sum(size for _, size in written) > 0.7 * 4 * 1_000_000


def test_the_wait_for_a_day_budget_is_what_it_takes() -> None:
    clock = Clock()
    budget = DayBudget(4_000, clock)
    assert budget.take(1_000) and not budget.take(10)
    clock.now_s += budget.wait_s(10) + 1e-6
    assert budget.take(10) and not budget.take(10)
    assert math.isfinite(budget.wait_s(5_000)), "more than a burst is never to be had"
    assert DayBudget(None, clock).take(1 << 60) and DayBudget(None, clock).wait_s(1) == 0


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
    assert rate.seconds(64 << 20, now_s) == pytest.approx(wanted_s, rel=0.1)


def test_readers_beside_each_other_are_one_stream() -> None:
    rate, now_s = LoadRate(), 0.0
    rate.begun(now_s)
    for _ in range(400):
        rate.begun(now_s)
        now_s += 0.001
        rate.ended(now_s, 0.002, 1 << 20)
    assert rate.bytes_per_s == pytest.approx((1 << 20) / 0.001, rel=0.05)


def test_what_was_learned_is_forgotten_slowly() -> None:
    rate = LoadRate()
    rate.begun(0.0)
    rate.ended(1000.0, 1000.0, 1 << 30)
    slow_s = rate.seconds(1 << 20, 1000.0)
    assert slow_s > 0.5
    assert rate.seconds(1 << 20, 1300.0) < 0.1 * slow_s
    guessed_s = (1 << 20) / GUESSED_BYTES_PER_S
    assert rate.seconds(1 << 20, 1e6) == pytest.approx(guessed_s + rate.latency_s, rel=0.01)
