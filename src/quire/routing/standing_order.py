"""Orders replicas by what a request meets there whatever its prompt is.

    step    0        1          2           ...       seconds of a step: LEAST_S * 2**(step / 16)
    mask    idle     0b0100     0b1001                bit i: the replica with index i

Seconds are rounded down to steps of 4.4%, far below what predicts them, and replicas of one step
count as equal. So a mask finds the best of any set of replicas with one `&` for each step up to its
own, however many replicas there are.
"""

import math
from bisect import bisect_left, insort
from functools import cache
from typing import NamedTuple

STEPS_PER_OCTAVE = 16
LEAST_S = 1e-3
"""What is less counts as 0."""


class Standing(NamedTuple):
    """A replica by its index, and the seconds of its step."""

    replica_index: int
    seconds: float


class StandingOrder:
    """Invariant: `_steps` are the keys of `_masks`, ascending; the masks are disjoint and not 0; a
    replica's bit is in that of its step."""

    def __init__(self) -> None:
        self._masks: dict[int, int] = {}
        self._steps: list[int] = []
        self._step_of: dict[int, int] = {}
        self._turn = 0

    def set(self, index: int, seconds: float) -> None:
        """A replica comes in, or its seconds, at least 0, have changed."""
        step = 0
        if seconds > LEAST_S:
            step = 1 + int(STEPS_PER_OCTAVE * math.log2(seconds / LEAST_S))
        if self._step_of.get(index) == step:
            return
        self.discard(index)
        self._step_of[index] = step
        if step not in self._masks:
            insort(self._steps, step)
        self._masks[step] = self._masks.get(step, 0) | 1 << index

    def discard(self, index: int) -> None:
        """A replica leaves, if it is there."""
        step = self._step_of.pop(index, None)
        if step is None:
            return
        left = self._masks[step] & ~(1 << index)
        if left:
            self._masks[step] = left
        else:
            del self._masks[step]
            del self._steps[bisect_left(self._steps, step)]

    def seconds(self, index: int) -> float:
        """Of a replica that is there, rounded as it is ordered."""
        return _seconds(self._step_of[index])

    def least(self, members: int, below_s: float = math.inf) -> Standing | None:
        """The first of these replicas (bit i: index i), if it has less than below_s.

        Of equal ones each has its turn, so that none is left idle with an empty cache.
        """
        for step in self._steps:
            seconds = _seconds(step)
            if seconds >= below_s:
                return None
            found = self._masks[step] & members
            if found:
                found = found >> self._turn << self._turn or found
                index = (found & -found).bit_length() - 1
                self._turn = index + 1
                return Standing(index, seconds)
        return None


@cache
def _seconds(step: int) -> float:
    return LEAST_S * 2.0 ** ((step - 1) / STEPS_PER_OCTAVE) if step else 0.0
