"""The lane of the host tier without a GPU, where each copy runs at once.

A lane is a queue of copies between the KV cache and the host tier, which a device works off beside
the steps (`staged_copies.Lane`). Without a GPU there is no such queue, so a copy has ended when the
call that makes it returns.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DoneCopy:
    """See `staged_copies.Copy`."""

    seconds: float

    def is_over(self) -> bool:
        return True


class PlainLane:
    """See `staged_copies.Lane`. It need not wait for steps, since a step on the CPU has ended when
    its launch returns."""

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
