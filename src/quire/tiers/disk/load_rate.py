"""Estimates the latency and bandwidth of loads from disk by measuring finished loads."""

import math
import threading
from typing import NamedTuple

GUESSED_BYTES_PER_S = 500e6
GUESSED_LATENCY_S = 0.5e-3
MEMORY_BYTES = 32 << 20
"""After this many further bytes, the weight of a measurement has fallen to 1 / e of its initial
value."""
GUESS_BYTES = 256 << 10
"""The initial guess weighs as much as a measurement of this many bytes, so a single slow read
reveals a slow disk."""
FORGET_S = 300.0
"""Without loads, the estimate returns toward the guess with this half-life in seconds, so that a
disk that was slow once is tried again."""


class LoadSpeed(NamedTuple):
    """Predicts the duration of a load from its latency and its bytes. Both fields are inf while no
    load can succeed."""

    latency_s: float
    s_per_byte: float

    def seconds(self, num_bytes: int) -> float:
        """Seconds for `num_bytes`, which has to include the bytes queued before the load."""
        return self.latency_s + num_bytes * self.s_per_byte if num_bytes else self.latency_s


NO_SPEED = LoadSpeed(math.inf, math.inf)


class LoadRate:
    """Measures the bandwidth of all readers together while at least one reads, and the latency of a
    read.

    Thread-safe.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bytes_per_s = GUESSED_BYTES_PER_S
        self._latency_s = GUESSED_LATENCY_S
        self._known_bytes = GUESS_BYTES
        self._num_reading = 0
        self._busy_since_s = 0.0
        self._learned_s = -math.inf

    def begun(self, now_s: float) -> None:
        """Record that a read begins."""
        with self._lock:
            if self._num_reading == 0:
                self._busy_since_s = now_s
            self._num_reading += 1

    def ended(self, now_s: float, took_s: float, num_bytes: int) -> None:
        """Record that a read has ended after `took_s` seconds. `num_bytes` is 0 if the read
        failed."""
        with self._lock:
            self._num_reading -= 1
            busy_s = max(now_s - self._busy_since_s, 1e-7)
            self._busy_since_s = now_s
            if num_bytes == 0:
                return
            weight = max(
                1.0 - math.exp(-num_bytes / MEMORY_BYTES),
                num_bytes / (self._known_bytes + num_bytes),
            )
            self._known_bytes += num_bytes
            slowness = (1 - weight) / self._bytes_per_s + weight * busy_s / num_bytes
            self._bytes_per_s = 1.0 / slowness
            # Subtract the transfer time. While several readers run, each gets an equal part of the
            # bandwidth.
            rest_s = took_s - num_bytes * (self._num_reading + 1) / self._bytes_per_s
            self._latency_s += 0.05 * (max(rest_s, 0.0) - self._latency_s)
            self._learned_s = now_s

    @property
    def is_learned(self) -> bool:
        """True if a load has been measured, so that the speed is not only a guess."""
        return math.isfinite(self._learned_s)

    def speed(self, now_s: float) -> LoadSpeed:
        """The predicted speed. Without new loads it returns to the guess over time."""
        share = 0.0
        if self.is_learned:
            share = 0.5 ** (max(now_s - self._learned_s, 0.0) / FORGET_S)
        bytes_per_s = self._bytes_per_s**share * GUESSED_BYTES_PER_S ** (1 - share)
        return LoadSpeed(self._latency_s, 1.0 / bytes_per_s)

    @property
    def bytes_per_s(self) -> float:
        return self._bytes_per_s

    @property
    def latency_s(self) -> float:
        return self._latency_s


def expected_speed(
    alone: LoadRate, beside: LoadRate, now_s: float, *, is_beside_steps: bool
) -> LoadSpeed:
    """Predicted speed of loads, either while steps run (`beside`) or while no step runs (`alone`).
    The speed measured in one case bounds the guess for the other case, so that a slow disk is tried
    only once."""
    speed_alone, speed_beside = alone.speed(now_s), beside.speed(now_s)
    if is_beside_steps:  # beside steps, loads are never faster than alone
        return max(speed_alone, speed_beside, key=lambda speed: speed.s_per_byte)
    return speed_beside if beside.is_learned and not alone.is_learned else speed_alone
