"""Finds the replica with the least delay in a set, by an index of delays.

    step    0        1          2           ...       seconds of a step: LEAST_S * 2**(step / 16)
    mask    idle     0b0100     0b1001                bit i: the replica with index i

The delay does not depend on a request's prompt. It is rounded down to steps of 4.4%, far finer than
the accuracy of its prediction, and replicas in one step count as equal. To find the best replica
of a set, `least` needs one `&` for each step up to the best, whatever the number of replicas.
"""

import math
from bisect import bisect_left, insort
from functools import cache
from typing import NamedTuple

STEPS_PER_OCTAVE = 16
LEAST_S = 1e-3
"""Shorter delays count as 0."""


class ReplicaDelay(NamedTuple):
    """The index of a replica, and its delay in seconds, rounded down to a step."""

    replica_index: int
    seconds: float


class DelayIndex:
    """Maps steps of delay to masks of replicas.

    Invariant: `_steps` holds the keys of `_masks` in ascending order. The masks are disjoint and
    not 0. The bit of each replica is in the mask of its step.
    """

    def __init__(self) -> None:
        self._masks: dict[int, int] = {}
        self._steps: list[int] = []
        self._step_of: dict[int, int] = {}
        #: The next tie goes to the first tied replica with at least this index.
        self._turn = 0

    def set(self, index: int, seconds: float) -> None:
        """Add a replica or change its delay; seconds >= 0."""
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
        """Remove a replica, if present."""
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
        """The delay of a replica in seconds, rounded down to a step. The replica must be
        present."""
        return _seconds(self._step_of[index])

    def least(self, members: int, below_s: float = math.inf) -> ReplicaDelay | None:
        """The replica with the least delay in the mask `members`; None if that delay is not below
        `below_s`.

        Replicas with equal delays are chosen in turn, so that no replica stays idle with an empty
        cache.
        """
        for step in self._steps:
            seconds = _seconds(step)
            if seconds >= below_s:
                return None
            found = self._masks[step] & members
            if found:
                # Prefer the equal replicas with an index of at least `_turn`; if there are none,
                # take all.
                found = found >> self._turn << self._turn or found
                index = (found & -found).bit_length() - 1
                self._turn = index + 1
                return ReplicaDelay(index, seconds)
        return None


@cache
def _seconds(step: int) -> float:
    return LEAST_S * 2.0 ** ((step - 1) / STEPS_PER_OCTAVE) if step else 0.0
