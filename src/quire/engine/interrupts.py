"""Ctrl-C between steps, not inside them: a step half planned or half applied can't be undone.

Knows no engine. Called by `llm`, whose caller's thread is the one that signals reach.
"""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def deferred_interrupts() -> Iterator[None]:
    """Hold SIGINT back inside, and hand it to whoever would have had it when leaving.

    Outside the main thread, and where the handler is not Python's, this does nothing: such a
    signal never raises here.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    held: list[FrameType | None] = []
    signal.signal(signal.SIGINT, lambda number, frame: held.append(frame))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if held:
            before(signal.SIGINT, held[0])
