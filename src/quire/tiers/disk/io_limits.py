"""When the disk is left alone: after failures, when a day's bytes are written, beside steps."""

import math
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol

from quire.observability.log import get_logger

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
DAY_S = 86400.0
BURST_SHARE = 0.25
"""Of a day's bytes that may be written at once; the rest comes evenly over the day."""
SHARE = 0.25
"""Of one processor's time, for all threads of a tier, while steps run."""
GUESSED_S = 1e-4
"""Of a processor, for an operation whose cost is not known yet."""
KEPT_SHARE = 1 / 32
"""Of what may be written at once: so much is lost of it when a process is killed."""
DAMAGE_LOG_S = 60.0
"""Damaged records are logged at most once in this time."""

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
        if not isinstance(error, OSError):
            logger.error("%s: a fault of quire's own:", self._what, exc_info=error)
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


class DamageLog:
    """Counts damaged records, and logs their number once a minute at most. For any thread."""

    def __init__(self, path: Path, clock: Callable[[], float]) -> None:
        """path: where the records are, as the log says it. clock: seconds."""
        self.num_records = 0  # that did not have the bytes that were written, or were unreadable
        self._path, self._clock = path, clock
        self._lock = threading.Lock()
        self._num_logged = 0
        self._quiet_until_s = -math.inf

    def note(self, num_records: int) -> None:
        """Count damaged records."""
        if not num_records:
            return
        with self._lock:
            self.num_records += num_records
            if (now_s := self._clock()) < self._quiet_until_s:
                return
            self._quiet_until_s = now_s + DAMAGE_LOG_S
            num_new, self._num_logged = self.num_records - self._num_logged, self.num_records
        logger.warning(
            "%s: %d cached blocks were damaged or unreadable, %d since the start; they are computed"
            " again. Check the disk; `quire cache verify` lists what else is damaged",
            *(self._path, num_new, self._num_logged),
        )


class Spent(NamedTuple):
    """What was written of a day's bytes and is not made up for yet. at_s: when, in the seconds of
    the system's calendar, which go on between processes."""

    num_bytes: int
    at_s: float


class Ledger(Protocol):
    """Keeps what was spent beyond a process."""

    def read_spent(self) -> Spent | None: ...
    def write_spent(self, spent: Spent) -> None: ...


class DayBudget:
    """A bucket of bytes that may be written; never more than bytes_a_day in any 24 hours, over all
    processes that had the ledger one after the other. Used by one thread.

    Invariant: what the ledger has is at least what was taken. So it is written ahead of what is
    taken, KEPT_SHARE of a bucket at a time; a process that is killed loses what it has not used.
    """

    def __init__(
        self,
        bytes_a_day: int | None,
        clock: Callable[[], float],
        ledger: Ledger | None = None,
        calendar: Callable[[], float] = time.time,
    ) -> None:
        """bytes_a_day: 0: none. None: no limit."""
        self._bytes_a_day, self._clock = bytes_a_day, clock
        self._ledger, self._calendar = ledger if bytes_a_day else None, calendar
        self._left = self._most = BURST_SHARE * (bytes_a_day or 0)
        self._rate = (1 - BURST_SHARE) * (bytes_a_day or 0) / DAY_S
        self._at_s = clock()
        self._num_ahead = 0.0  # that the ledger has as spent, and that were not taken
        if self._ledger is not None and (spent := self._ledger.read_spent()) is not None:
            # A calendar that was set back gives nothing.
            made_up = self._rate * max(calendar() - spent.at_s, 0.0)
            self._left -= max(spent.num_bytes - made_up, 0.0)

    @property
    def is_none(self) -> bool:
        """Whether nothing may be written, at any time."""
        return self._bytes_a_day == 0

    def take(self, num_bytes: int) -> bool:
        """Whether so many bytes may be written now; they are then taken out.

        Raises OSError where the ledger can't be written; then nothing is taken.
        """
        if self._bytes_a_day is None:
            return True
        self._fill()
        if num_bytes > self._left:
            return False
        if self._ledger is not None:
            if num_bytes > self._num_ahead:
                self._keep(max(num_bytes, int(KEPT_SHARE * self._most)))
            self._num_ahead -= num_bytes
        self._left -= num_bytes
        return True

    def close(self) -> None:
        """Give back what the ledger has too much. Raises OSError."""
        if self._ledger is not None and self._num_ahead:
            self._fill()
            self._keep(0)

    def _keep(self, num_ahead: int) -> None:
        assert self._ledger is not None, "only where there is one"
        spent = math.ceil(self._most - self._left) + num_ahead
        self._ledger.write_spent(Spent(spent, self._calendar()))
        self._num_ahead = num_ahead

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


class IoPace:
    """Holds a tier's threads back while steps run beside them.

    What they copy, check and write takes processors and memory bandwidth from the steps. So while
    steps run, they together use a small share of one processor: loads still come at a gigabyte a
    second, if the disk has it. An engine that has nothing to do but to wait gets them at once.

    Invariant: while steps run, an operation begins only when SHARE of the time since then has paid
    for those that began before, whoever's. One that hangs keeps nobody from going on.

    Steps run if the engine asks what has ended, again and again, and does not wait in between.
    """

    def __init__(self) -> None:
        self._is_alone = threading.Event()
        self._is_alone.set()
        self._has_waited = True
        self._lock = threading.Lock()
        self._free_at_s = 0.0
        self._expected_s = GUESSED_S

    @property
    def is_beside_steps(self) -> bool:
        return not self._is_alone.is_set()

    def asked(self) -> None:
        """The engine has asked what has ended. By its thread."""
        if not self._has_waited and self._is_alone.is_set():
            self._is_alone.clear()
        self._has_waited = False

    def waits(self) -> None:
        """The engine waits for what ends. By its thread."""
        self._has_waited = True
        if not self._is_alone.is_set():
            self._is_alone.set()

    def hold_back(self, most_s: float) -> float:
        """Return when the next operation may begin, after most_s at the latest: what is set aside
        for it, in seconds of a processor. `used` follows."""
        until_s = time.monotonic() + most_s
        while True:
            with self._lock:
                now_s = time.monotonic()
                if not self.is_beside_steps:
                    self._free_at_s = now_s  # so far nobody was disturbed
                free_at_s = min(self._free_at_s, until_s)
                if free_at_s <= now_s:
                    expected_s = self._expected_s
                    self._free_at_s = max(self._free_at_s, now_s) + expected_s / SHARE
                    return expected_s
            # To be woken up again and again would disturb steps more than most operations.
            self._is_alone.wait(free_at_s - now_s)

    def used(self, processor_s: float, set_aside_s: float) -> None:
        """The operation that was let go has taken so much of a processor."""
        with self._lock:
            self._free_at_s += (processor_s - set_aside_s) / SHARE
            self._expected_s += 0.1 * (processor_s - self._expected_s)
