"""Limits of disk use: pauses after failures, a daily write limit, throttling while steps run."""

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
"""Share of the daily bytes that may be written at once. The rest becomes available evenly over the
day."""
SHARE = 0.25
"""Share of one CPU core that all threads of a tier together may use while steps run."""
GUESSED_S = 1e-4
"""Assumed CPU seconds of an operation until one has been measured."""
KEPT_SHARE = 1 / 32
"""The ledger is charged ahead of use, in portions of this share of the burst. A killed process
loses the unused part of a portion.
"""
DAMAGE_LOG_S = 60.0
"""Damaged records are logged at most once in this many seconds."""

logger = get_logger(__name__)


class Health:
    """Tracks failures of a kind of operation, such as loads, and pauses it after a failure.

    The first pause lasts 1 s, and each further failure in a row doubles it, up to 60 s. After a
    pause, the next operation is a trial. One line is logged when the first pause begins, and one
    when an operation succeeds again.
    """

    def __init__(self, what: str, clock: Callable[[], float]) -> None:
        """`what` names the operation in the log. `clock` returns seconds."""
        self.num_failures = 0
        self._what, self._clock = what, clock
        self._num_in_row = 0
        self._until_s = 0.0

    @property
    def is_good(self) -> bool:
        """True if the operation is neither paused nor on trial."""
        return self._num_in_row == 0

    @property
    def is_paused(self) -> bool:
        return self._num_in_row > 0 and self._clock() < self._until_s

    def failed(self, error: BaseException) -> None:
        if not isinstance(error, OSError):
            logger.error("%s: internal error of quire:", self._what, exc_info=error)
        self.num_failures += 1
        # Operations that ran concurrently fail for the same reason, so they count once.
        if self.is_paused:
            return
        pause_s = min(FIRST_PAUSE_S * 2.0**self._num_in_row, LONGEST_PAUSE_S)
        self._until_s = self._clock() + pause_s
        self._num_in_row = min(self._num_in_row + 1, 16)
        if self._num_in_row == 1:
            logger.warning(
                "%s: paused: %s; serving continues without it; next try after %g s, then"
                " up to every %g s",
                *(self._what, error, pause_s, LONGEST_PAUSE_S),
            )

    def record_success(self) -> None:
        if self._num_in_row and not self.is_paused:
            self._num_in_row = 0
            logger.info("%s: works again", self._what)


class DamageLog:
    """Counts damaged records and logs their number at most once a minute. Thread-safe."""

    def __init__(self, path: Path, clock: Callable[[], float]) -> None:
        """`path` is the namespace's folder, for the log. `clock` returns seconds."""
        #: Number of records that were unreadable or differed from the bytes written.
        self.num_records = 0
        self._path, self._clock = path, clock
        self._lock = threading.Lock()
        self._num_logged = 0
        self._quiet_until_s = -math.inf

    def count(self, num_records: int) -> None:
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
    """Bytes of the daily limit that are used up: bytes written, minus those regained as time
    passed."""

    num_bytes: int
    #: The time of this state in seconds since 1970, so that another process can compare it.
    at_s: float


class Ledger(Protocol):
    """Saves the spent bytes for later processes."""

    def read_spent(self) -> Spent | None: ...
    def write_spent(self, spent: Spent) -> None: ...


class DayBudget:
    """A token bucket of bytes that may be written. At most `bytes_a_day` are written in any 24
    hours, even by several processes that use the ledger one after the other. Used by one thread.

    Invariant: the ledger records at least the bytes that were spent. It is charged in advance, by
    KEPT_SHARE of a full bucket at a time; a killed process loses the unused rest.
    """

    def __init__(
        self,
        bytes_a_day: int | None,
        clock: Callable[[], float],
        ledger: Ledger | None = None,
        calendar: Callable[[], float] = time.time,
    ) -> None:
        """If `bytes_a_day` is 0, nothing may be written. None means no limit."""
        self._bytes_a_day, self._clock = bytes_a_day, clock
        self._ledger, self._calendar = ledger if bytes_a_day else None, calendar
        self._left = self._most = BURST_SHARE * (bytes_a_day or 0)
        self._rate = (1 - BURST_SHARE) * (bytes_a_day or 0) / DAY_S
        self._at_s = clock()
        #: Bytes that the ledger records as spent, but that are not spent yet.
        self._num_ahead = 0.0
        if self._ledger is not None and (spent := self._ledger.read_spent()) is not None:
            # If the calendar was set back, no bytes are regained.
            made_up = self._rate * max(calendar() - spent.at_s, 0.0)
            self._left -= max(spent.num_bytes - made_up, 0.0)

    @property
    def is_none(self) -> bool:
        """True if the limit is 0, so that nothing may ever be written."""
        return self._bytes_a_day == 0

    def spend(self, num_bytes: int) -> bool:
        """Take `num_bytes` out of the bucket. Returns False if they may not be written now.

        Raises OSError if the ledger can't be written; then nothing is taken.
        """
        if self._bytes_a_day is None:
            return True
        self._refill()
        if num_bytes > self._left:
            return False
        if self._ledger is not None:
            if num_bytes > self._num_ahead:
                self._write_ledger(max(num_bytes, int(KEPT_SHARE * self._most)))
            self._num_ahead -= num_bytes
        self._left -= num_bytes
        return True

    def close(self) -> None:
        """Write the bytes actually spent to the ledger, without those charged in advance. Raises
        OSError."""
        if self._ledger is not None and self._num_ahead:
            self._refill()
            self._write_ledger(0)

    def _write_ledger(self, num_ahead: int) -> None:
        assert self._ledger is not None, "called only with a ledger"
        spent = math.ceil(self._most - self._left) + num_ahead
        self._ledger.write_spent(Spent(spent, self._calendar()))
        self._num_ahead = num_ahead

    def wait_s(self, num_bytes: int) -> float:
        """Seconds until `num_bytes` may be written, or until the bucket is full if that is sooner.
        Returns inf if the limit is 0."""
        if self._bytes_a_day is None:
            return 0.0
        if self._bytes_a_day == 0:
            return math.inf
        self._refill()
        return max(min(num_bytes, self._most) - self._left, 0.0) / self._rate

    def _refill(self) -> None:
        now_s = self._clock()
        self._left = min(self._left + self._rate * max(now_s - self._at_s, 0.0), self._most)
        self._at_s = now_s


class IoPace:
    """Throttles a tier's threads while the engine runs steps at the same time.

    The threads' copies, checksums and writes take CPU time and memory bandwidth from the steps. So
    while steps run, the threads together use a small share of one CPU core; loads still reach 1
    GB/s if the disk does. When the engine only waits, they run at full speed.

    Steps are assumed to run if the engine calls `asked` twice without `waits` in between.

    Invariant: while steps run, an operation begins only after all threads' earlier operations
    together have used at most SHARE of the elapsed time. An operation that hangs does not block
    later operations.
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
        """Record that the engine polled for ended moves. Called by the engine's thread."""
        if not self._has_waited and self._is_alone.is_set():
            self._is_alone.clear()
        self._has_waited = False

    def waits(self) -> None:
        """Record that the engine waits for moves to end, so no step runs. Called by the engine's
        thread."""
        self._has_waited = True
        if not self._is_alone.is_set():
            self._is_alone.set()

    def wait_turn(self, most_s: float) -> float:
        """Wait until the next operation may begin, but at most `most_s` seconds. Returns the CPU
        seconds reserved for it, which the caller passes to `used` afterwards."""
        until_s = time.monotonic() + most_s
        while True:
            with self._lock:
                now_s = time.monotonic()
                if not self.is_beside_steps:
                    self._free_at_s = now_s  # operations so far have disturbed no step
                free_at_s = min(self._free_at_s, until_s)
                if free_at_s <= now_s:
                    expected_s = self._expected_s
                    self._free_at_s = max(self._free_at_s, now_s) + expected_s / SHARE
                    return expected_s
            # Sleep until then without polling, since repeated wake-ups would disturb steps more
            # than most operations do.
            self._is_alone.wait(free_at_s - now_s)

    def used(self, processor_s: float, set_aside_s: float) -> None:
        """Replace an operation's reserved CPU seconds, `set_aside_s`, by the measured
        `processor_s`."""
        with self._lock:
            self._free_at_s += (processor_s - set_aside_s) / SHARE
            self._expected_s += 0.1 * (processor_s - self._expected_s)
