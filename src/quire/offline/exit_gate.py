"""Keeps threads out of the engine's native code once the interpreter ends.

A daemon thread goes on while the interpreter ends, and Python (before 3.14) ends it where it next
asks for the interpreter's lock. In torch's C++ that aborts the whole process. So at exit the steps
under way are waited for, and no other one begins. Used by `local_engine` and `turns`.
"""

import os
import threading

EXIT_WAIT_S = 30.0
"""How long the end of the interpreter waits for a step, or for a part of a model to be loaded."""


class ExitGate:
    """`with gate:` around native code. Not to be entered by a thread that is inside.

    Invariant: once `close` has begun, no thread enters but the one that called it; the others that
    want to, or that come to a `stop_point`, sleep as long as the process lives.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._changed = threading.Condition()
        self._num_inside = 0
        self._closed_by: int | None = None  # the thread that called `close`

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
        """Inside: sleep here if the interpreter ends. For work that takes long."""
        if self._closed_by not in (None, threading.get_ident()):
            self.__exit__()
            _sleep_for_good()

    def close(self, timeout_s: float = EXIT_WAIT_S) -> bool:
        """Let no other thread in, and wait until all have left; whether they have by then. In a
        process that was forked from the gate's there is none to wait for."""
        if os.getpid() != self._pid:
            return True
        with self._changed:
            self._closed_by = threading.get_ident()
            return self._changed.wait_for(lambda: not self._num_inside, timeout_s)


def _sleep_for_good() -> None:
    threading.Event().wait()
