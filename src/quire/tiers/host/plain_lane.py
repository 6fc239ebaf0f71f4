"""The copy lane of the host tier without a GPU, where each copy runs synchronously.

A lane is a queue of copies between the KV cache and the host tier, which a device executes while
steps run (`staged_copies.Lane`). Without a GPU there is no queue: a copy has ended when the call
that makes it returns.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DoneCopy:
    """A `staged_copies.Copy` that has ended."""

    seconds: float

    def is_over(self) -> bool:
        return True


class PlainLane:
    """A `staged_copies.Lane` without a queue. It never waits for steps, since a step on the CPU has
    ended when its launch returns."""

    def __init__(self) -> None:
        self._began_s = 0.0

    @contextmanager
    def queue(self, *, is_after_steps: bool) -> Iterator[None]:
        yield

    def begin(self) -> None:
        self._began_s = time.perf_counter()

    def end(self) -> DoneCopy:
        return DoneCopy(time.perf_counter() - self._began_s)

    def synchronize(self) -> None:
        """Returns at once, since no work is ever queued."""
