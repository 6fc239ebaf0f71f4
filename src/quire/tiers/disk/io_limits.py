"""When the disk is left alone: after failures, and when a day's bytes are written."""

import math
from collections.abc import Callable

from quire.observability.log import get_logger

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
DAY_S = 86400.0
BURST_SHARE = 0.25
"""Of a day's bytes that may be written at once; the rest comes evenly over the day."""

logger = get_logger(__name__)


class Health:
    """Whether a kind of operation is worth trying.

    After a failure it pauses, for 1 s at first, twice as long after each further one in a row, at
    most for 60 s; then the next operation is the trial. One line is logged when it goes bad, and
    one when it works again.
    """

    def __init__(self, what: str, clock: Callable[[], float]) -> None:
        """what: that is paused, as the log says it. clock: seconds."""
        self.num_failures = 0
        self._what, self._clock = what, clock
        self._num_in_row = 0
        self._until_s = 0.0

    @property
    def is_good(self) -> bool:
        """Neither paused, nor on trial."""
        return self._num_in_row == 0

    @property
    def is_paused(self) -> bool:
        return self._num_in_row > 0 and self._clock() < self._until_s

    def failed(self, error: BaseException) -> None:
        self.num_failures += 1
        # Several operations may have been under way; they failed for one reason.
        if self.is_paused:
            return
        pause_s = min(FIRST_PAUSE_S * 2.0**self._num_in_row, LONGEST_PAUSE_S)
        self._until_s = self._clock() + pause_s
        self._num_in_row = min(self._num_in_row + 1, 16)
        if self._num_in_row == 1:
            logger.warning(
                "%s: paused: %s; serving goes on without, and it is tried again after %g s, then"
                " up to every %g s",
                *(self._what, error, pause_s, LONGEST_PAUSE_S),
            )

    def worked(self) -> None:
        if self._num_in_row and not self.is_paused:
            self._num_in_row = 0
            logger.info("%s: works again", self._what)


class DayBudget:
    """A bucket of bytes that may be written; never more than bytes_a_day in any 24 hours of one
    process. Used by one thread."""

    def __init__(self, bytes_a_day: int | None, clock: Callable[[], float]) -> None:
        """bytes_a_day: 0: none. None: no limit."""
        self._bytes_a_day, self._clock = bytes_a_day, clock
        self._left = self._most = BURST_SHARE * (bytes_a_day or 0)
        self._rate = (1 - BURST_SHARE) * (bytes_a_day or 0) / DAY_S
        self._at_s = clock()

    def take(self, num_bytes: int) -> bool:
        """Whether so many bytes may be written now; they are then taken out."""
        if self._bytes_a_day is None:
            return True
        self._fill()
        if num_bytes > self._left:
            return False
        self._left -= num_bytes
        return True

    def wait_s(self, num_bytes: int) -> float:
        """Until so many bytes may be written; at most until the bucket is full. Infinite where
        none ever may."""
        if self._bytes_a_day is None:
            return 0.0
        if self._bytes_a_day == 0:
            return math.inf
        self._fill()
        return max(min(num_bytes, self._most) - self._left, 0.0) / self._rate

    def _fill(self) -> None:
        now_s = self._clock()
        self._left = min(self._left + self._rate * max(now_s - self._at_s, 0.0), self._most)
        self._at_s = now_s
