"""Delays signals until the step under way is complete.

A handler may raise, as that of Ctrl-C does, or that of a time limit (SIGALRM). Knows no engine.
Called by `turns`, in the thread that uses the engine; Python runs handlers in the main one.
"""

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import FrameType

_NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGALRM", "SIGUSR1", "SIGUSR2")
HELD_SIGNALS = tuple(getattr(signal, name) for name in _NAMES if hasattr(signal, name))
"""Those that programs set handlers for which raise. Not the ones of profilers, nor SIGCHLD: their
handlers return, and want to run at once."""


@contextmanager
def deferred_interrupts(wake: Callable[[], None] | None = None) -> Iterator[Sequence[object]]:
    """Hold `HELD_SIGNALS` back inside, and call the handlers that they have when leaving; once for
    each signal, however often it came.

    wake: called, by the signal's handler, when one comes; for a thread that sleeps inside. Yields a
    list that is empty until then.

    Outside the main thread this does nothing, nor for a signal whose handler is not Python's: such
    a signal never raises here.
    """
    held: list[tuple[int, FrameType | None]] = []
    if threading.current_thread() is not threading.main_thread():
        yield held
        return
    handlers = {number: signal.getsignal(number) for number in HELD_SIGNALS}
    before = {number: handler for number, handler in handlers.items() if callable(handler)}
    is_inside = True

    def hold(number: int, frame: FrameType | None) -> None:
        if not is_inside:  # left in place by a handler that raised while they were put back
            before[signal.Signals(number)](number, frame)
            return
        held.append((number, frame))
        if wake is not None:
            wake()

    try:
        for number in before:
            signal.signal(number, hold)
        yield held
    finally:
        try:
            for number, handler in before.items():
                signal.signal(number, handler)
        finally:
            is_inside = False
            with ExitStack() as calls:  # calls all, though one raises
                for number, frame in {number: frame for number, frame in reversed(held)}.items():
                    calls.callback(before[number], number, frame)
