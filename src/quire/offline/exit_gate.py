"""Keeps threads out of the engine's native code once the interpreter ends.

A daemon thread goes on while the interpreter ends, and Python (before 3.14) ends the thread when it
next acquires the interpreter's lock. In torch's C++ that aborts the whole process. So the exit
waits for the current step, and no other step begins. Used by `local_engine` and `turns`.
"""

import os
import threading

EXIT_WAIT_S = 30.0
"""Maximum seconds that the interpreter's exit waits for a step, or for loading a part of a
model."""


class ExitGate:
    """A context manager around native code. A thread that is inside must not enter again.

    Invariant: once `close` has begun, only the thread that called it enters. Other threads that try
    to enter, or that reach a `stop_point`, sleep until the process ends.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._changed = threading.Condition()
        self._num_inside = 0
        #: The thread that called `close`; None while the gate is open.
        self._closed_by: int | None = None

    def __enter__(self) -> None:
        with self._changed:
            is_open = self._closed_by in (None, threading.get_ident())
            self._num_inside += is_open
        if not is_open:
            _sleep_for_good()

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._num_inside -= 1
            self._changed.notify_all()

    def stop_point(self) -> None:
        """Sleep for good if the interpreter is ending. Called inside the gate, during long work."""
        if self._closed_by not in (None, threading.get_ident()):
            self.__exit__()
            _sleep_for_good()

    def close(self, timeout_s: float = EXIT_WAIT_S) -> bool:
        """Let no other thread in, and wait until all have left. Returns False after `timeout_s`."""
        if os.getpid() != self._pid:  # a forked process has none of the threads
            return True
        with self._changed:
            self._closed_by = threading.get_ident()
            return self._changed.wait_for(lambda: not self._num_inside, timeout_s)


def _sleep_for_good() -> None:
    threading.Event().wait()
