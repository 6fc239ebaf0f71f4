"""Delays signals until the current step is complete.

A signal's handler may raise an exception, as for Ctrl-C or a time limit (SIGALRM). Independent of
the engine. Called by `turns`, in the thread that uses the engine; Python runs handlers in the main
thread.
"""

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import FrameType

_NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGALRM", "SIGUSR1", "SIGUSR2")
HELD_SIGNALS = tuple(getattr(signal, name) for name in _NAMES if hasattr(signal, name))
"""Signals for which programs set handlers that raise. Signals of profilers and SIGCHLD are not
among them, since their handlers return and should run at once."""


@contextmanager
def deferred_interrupts(wake: Callable[[], None] | None = None) -> Iterator[Sequence[object]]:
    """Hold back `HELD_SIGNALS` inside the block, and call their handlers at its end.

    Each handler is called once, however often its signal came. Yields a list that is empty until a
    signal comes. When a signal comes, `wake` is called, to wake a thread that sleeps in the block.
    Outside the main thread nothing is held back, since Python runs no handlers there. Signals
    without a Python handler are not held back, since they raise nothing.
    """
    held: list[tuple[int, FrameType | None]] = []
    if threading.current_thread() is not threading.main_thread():
        yield held
        return
    handlers = {number: signal.getsignal(number) for number in HELD_SIGNALS}
    before = {number: handler for number, handler in handlers.items() if callable(handler)}
    is_inside = True

    def hold(number: int, frame: FrameType | None) -> None:
        if not is_inside:  # still installed: a handler raised while others were restored
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
            with ExitStack() as calls:  # calls all handlers, even if one raises
                for number, frame in {number: frame for number, frame in reversed(held)}.items():
                    calls.callback(before[number], number, frame)
