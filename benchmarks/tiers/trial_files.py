"""Files that end the process at the n-th call, fail, fall short or wait; for the crash matrix."""

import errno
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from quire.tiers.disk.files import Buffer, Files

CHANGES = (
    *("create", "pwritev", "truncate", "sync_data", "sync_folder"),
    *("make_folder", "remove_folder", "rename", "unlink"),
)
"""The calls that change what lies on disk, or make it durable."""

MOMENTS = ("before", "in the middle of", "after")


@dataclass(frozen=True, slots=True)
class Trial:
    """The faults to inject, each from a call on, counted from 1 over all threads.

    kill_at: of the calls that change something, the one at which the process ends, by kill -9.
    moment: one of MOMENTS; only a write has a middle, the others end before. errors: call ->
    number of the error, for num_errors calls of that name after the first `after` ones.
    most_bytes: that a read or a write moves at once. slow_reads: this number of large reads take
    slow_s seconds.
    """

    kill_at: int = 0
    moment: str = "before"
    errors: Mapping[str, int] = field(default_factory=dict)
    after: int = 0
    num_errors: int = 1 << 30
    most_bytes: int = 1 << 62
    slow_reads: int = 0
    slow_s: float = 0.0


LARGE_BYTES = 8192
"""Reads of fewer bytes are those of headers and footers."""


class TrialFiles(Files):
    """The real calls, under a trial. calls: of each name, so far. num_changes: of CHANGES."""

    def __init__(self, trial: Trial) -> None:
        self._trial = trial
        self._lock = threading.Lock()
        self.calls: Counter[str] = Counter()
        self.num_changes = 0
        self.num_slow = 0

    def preadv(self, descriptor: int, buffers: Sequence[memoryview], offset: int) -> int:
        trial = self._trial
        if sum(len(buffer) for buffer in buffers) >= LARGE_BYTES:
            with self._lock:
                self.num_slow += 1
                is_slow = self.num_slow <= trial.slow_reads
            if is_slow:
                time.sleep(trial.slow_s)
        return super().preadv(descriptor, _short(buffers, trial.most_bytes), offset)

    def pwritev(self, descriptor: int, buffers: Sequence[Buffer], offset: int) -> int:
        return super().pwritev(descriptor, _short(buffers, self._trial.most_bytes), offset)

    def begin(self, name: str, given: tuple[Any, ...]) -> bool:
        """Before a call; whether the process ends after it."""
        trial = self._trial
        with self._lock:
            self.calls[name] += 1
            number = self.calls[name] - trial.after
            self.num_changes += name in CHANGES
            is_last = name in CHANGES and self.num_changes == trial.kill_at
        if is_last and trial.moment != "after":
            if trial.moment == "in the middle of" and name == "pwritev":
                descriptor, buffers, offset = given
                whole = b"".join(bytes(buffer) for buffer in buffers)
                os.pwrite(descriptor, whole[: len(whole) // 2], offset)
            end_now()
        if name in trial.errors and 0 < number <= trial.num_errors:
            raise OSError(trial.errors[name], os.strerror(trial.errors[name]))
        return is_last


def end_now() -> None:
    """As a kill from outside: nothing is flushed, nothing is told."""
    os.kill(os.getpid(), signal.SIGKILL)


def _short(buffers: Sequence[Any], most_bytes: int) -> Sequence[Any]:
    return buffers if most_bytes >= 1 << 62 else [memoryview(buffers[0])[:most_bytes]]


def _tried(name: str, own: Callable[..., Any]) -> Callable[..., Any]:
    def call(files: TrialFiles, *given: Any) -> Any:
        is_last = files.begin(name, given)
        result = own(files, *given)
        if is_last:
            end_now()
        return result

    return call


for _name in [name for name in vars(Files) if not name.startswith("_")]:
    setattr(TrialFiles, _name, _tried(_name, getattr(TrialFiles, _name)))

FULL, BROKEN, READ_ONLY = errno.ENOSPC, errno.EIO, errno.EROFS
NO_MEMORY, REFUSED = errno.ENOMEM, errno.EACCES
