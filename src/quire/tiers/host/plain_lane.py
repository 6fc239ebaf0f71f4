"""A synchronous lane, for the host tier without a GPU."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DoneCopy:
    """See `copies.Copy`."""

    seconds: float

    def is_over(self) -> bool:
        return True


class PlainLane:
    """See `staged_copies.Lane`. Steps on the CPU have ended when their launch returns."""

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
        """Has nothing to wait for."""
