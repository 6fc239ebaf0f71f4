"""What is learned of a disk's bandwidth, and how soon."""

import pytest

from quire.tiers.disk.load_rate import LoadRate, expected_speed


def read(rate: LoadRate, begun_s: float, num_bytes: int, bytes_per_s: float) -> float:
    rate.begun(begun_s)
    ended_s = begun_s + num_bytes / bytes_per_s
    rate.ended(ended_s, ended_s - begun_s, num_bytes)
    return ended_s


def test_the_first_read_counts_for_more_than_the_guess() -> None:
    rate = LoadRate()
    read(rate, 0.0, 1 << 20, 5e6)
    assert 5e6 < rate.bytes_per_s < 7e6


def test_many_reads_tell_the_rate() -> None:
    rate, now_s = LoadRate(), 0.0
    for _ in range(64):
        now_s = read(rate, now_s, 1 << 20, 50e6)
    assert rate.bytes_per_s == pytest.approx(50e6, rel=0.05)


def test_a_rate_learned_alone_bounds_the_guess_beside_steps_and_vice_versa() -> None:
    slow, guessed = LoadRate(), LoadRate()
    slow.begun(0.0)
    slow.ended(1.0, 1.0, 5_000_000)
    for is_beside_steps in (False, True):
        for alone, beside in ((slow, guessed), (guessed, slow)):
            speed = expected_speed(alone, beside, 1.0, is_beside_steps=is_beside_steps)
            assert 4e6 < 1.0 / speed.s_per_byte < 6e6
    fast = LoadRate()
    fast.begun(0.0)
    fast.ended(1.0, 1.0, 2_000_000_000)
    assert expected_speed(fast, slow, 1.0, is_beside_steps=False) == fast.speed(1.0)
    assert expected_speed(fast, slow, 1.0, is_beside_steps=True) == slow.speed(1.0)
