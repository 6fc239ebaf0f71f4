"""Limits of disk use: pauses after failures, a daily limit of writes, throttling beside steps."""

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
"""Share of a day's bytes that may be written at once. The rest is granted evenly over the day."""
SHARE = 0.25
"""Share of one processor that all threads of a tier may use while steps run."""
GUESSED_S = 1e-4
"""Processor seconds of an operation until its cost is measured."""
KEPT_SHARE = 1 / 32
"""The ledger records this share of the burst ahead of its use. A killed process loses the unused
part.
"""
DAMAGE_LOG_S = 60.0
"""Damaged records are logged at most once in this many seconds."""

logger = get_logger(__name__)


class Health:
    """Whether a kind of operation is worth trying.

    After a failure it pauses, at first for 1 s, doubled after each further failure in a row, up to
    60 s. Then the next operation is a trial. One line is logged when a pause begins, and one when
    an operation works again.
    """

    def __init__(self, what: str, clock: Callable[[], float]) -> None:
        """`what` names the operation in the log. `clock` returns seconds."""
        self.num_failures = 0
        self._what, self._clock = what, clock
        self._num_in_row = 0
        self._until_s = 0.0

    @property
    def is_good(self) -> bool:
        """Whether the operation is neither paused nor on trial."""
        return self._num_in_row == 0

    @property
    def is_paused(self) -> bool:
        return self._num_in_row > 0 and self._clock() < self._until_s

    def failed(self, error: BaseException) -> None:
        if not isinstance(error, OSError):
            logger.error("%s: a fault of quire's own:", self._what, exc_info=error)
        self.num_failures += 1
        # Several operations may have been running; they failed for one reason.
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

    def record_success(self) -> None:
        if self._num_in_row and not self.is_paused:
            self._num_in_row = 0
            logger.info("%s: works again", self._what)


class DamageLog:
    """Counts damaged records and logs their number at most once a minute. For any thread."""

    def __init__(self, path: Path, clock: Callable[[], float]) -> None:
        """`path` names the place of the records in the log. `clock` returns seconds."""
        #: Records that were unreadable or had other bytes than those written.
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
    """Bytes of the daily limit that were written and have not been regained by the passing of
    time."""

    num_bytes: int
    #: The time of this state in seconds since 1970, which is comparable between processes.
    at_s: float


class Ledger(Protocol):
    """Saves the spent bytes beyond the end of a process."""

    def read_spent(self) -> Spent | None: ...
    def write_spent(self, spent: Spent) -> None: ...


class DayBudget:
    """A token bucket of bytes that may be written. At most `bytes_a_day` are written in any 24
    hours, by all processes that have the ledger in turn. Used by one thread.

    Invariant: the ledger records at least the bytes that were taken. So it is written ahead, by
    KEPT_SHARE of a bucket at a time; a killed process loses the unused rest.
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
        #: Bytes that the ledger records as spent, but that were not taken yet.
        self._num_ahead = 0.0
        if self._ledger is not None and (spent := self._ledger.read_spent()) is not None:
            # A calendar that was set back grants nothing.
            made_up = self._rate * max(calendar() - spent.at_s, 0.0)
            self._left -= max(spent.num_bytes - made_up, 0.0)

    @property
    def is_none(self) -> bool:
        """Whether nothing may ever be written."""
        return self._bytes_a_day == 0

    def spend(self, num_bytes: int) -> bool:
        """Take `num_bytes` out of the bucket if they may be written now. Returns whether they may.

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
        """Correct the ledger to the bytes that were taken, without those that were recorded ahead.
        Raises OSError."""
        if self._ledger is not None and self._num_ahead:
            self._refill()
            self._write_ledger(0)

    def _write_ledger(self, num_ahead: int) -> None:
        assert self._ledger is not None, "only where there is one"
        spent = math.ceil(self._most - self._left) + num_ahead
        self._ledger.write_spent(Spent(spent, self._calendar()))
        self._num_ahead = num_ahead

    def wait_s(self, num_bytes: int) -> float:
        """Seconds until `num_bytes` may be written, or until the bucket is full if that is sooner.
        Infinite if writes are never allowed."""
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

    The threads' copies, checks and writes take processor time and memory bandwidth from the steps.
    So while steps run, the threads together use a small share of one processor; loads still reach a
    gigabyte a second if the disk does. When the engine only waits, they run at full speed.

    Steps are assumed to run if the engine calls `asked` repeatedly without `waits` in between.

    Invariant: while steps run, an operation begins only when SHARE of the elapsed time has paid for
    all earlier operations, of any thread. An operation that hangs does not block later operations.
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
        """Note that the engine has asked which moves have ended. Called by the engine's thread."""
        if not self._has_waited and self._is_alone.is_set():
            self._is_alone.clear()
        self._has_waited = False

    def waits(self) -> None:
        """Note that the engine waits for moves to end. Called by the engine's thread."""
        self._has_waited = True
        if not self._is_alone.is_set():
            self._is_alone.set()

    def wait_turn(self, most_s: float) -> float:
        """Wait until the next operation may begin, at most `most_s`. Returns the processor seconds
        that are reserved for it. `used` has to follow."""
        until_s = time.monotonic() + most_s
        while True:
            with self._lock:
                now_s = time.monotonic()
                if not self.is_beside_steps:
                    self._free_at_s = now_s  # no step was disturbed so far
                free_at_s = min(self._free_at_s, until_s)
                if free_at_s <= now_s:
                    expected_s = self._expected_s
                    self._free_at_s = max(self._free_at_s, now_s) + expected_s / SHARE
                    return expected_s
            # Sleep until then, since repeated wake-ups would disturb steps more than most
            # operations.
            self._is_alone.wait(free_at_s - now_s)

    def used(self, processor_s: float, set_aside_s: float) -> None:
        """Replace the reserved time of an operation by the processor seconds that it took."""
        with self._lock:
            self._free_at_s += (processor_s - set_aside_s) / SHARE
            self._expected_s += 0.1 * (processor_s - self._expected_s)
