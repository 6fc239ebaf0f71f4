"""Ctrl-C between steps, not inside them: a step half planned or half applied can't be undone.

Knows no engine. Called by `turns`, in whichever thread uses the engine; signals reach the main one.
"""

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType


@contextmanager
def deferred_interrupts(wake: Callable[[], None] | None = None) -> Iterator[Sequence[object]]:
    """Hold SIGINT back inside, and hand it to whoever would have had it when leaving.

    wake: called, by the signal's handler, when one comes; for a thread that sleeps inside. Yields a
    list that is empty until then.

    Outside the main thread, and where the handler is not Python's, this does nothing: such a
    signal never raises here.
    """
    held: list[FrameType | None] = []
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield held
        return

    def hold(number: int, frame: FrameType | None) -> None:
        held.append(frame)
        if wake is not None:
            wake()

    signal.signal(signal.SIGINT, hold)
    try:
        yield held
    finally:
        signal.signal(signal.SIGINT, before)
        if held:
            before(signal.SIGINT, held[0])
