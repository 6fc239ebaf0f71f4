"""The handlers of SIGINT and SIGTERM in a server. Called by `launch`."""

import asyncio
import signal
from collections.abc import Callable
from typing import Any


class Stopper:
    """Handles SIGINT and SIGTERM: the first signal calls `on_first`, the second cancels the
    server's task.

    A signal before `on_first` is set also cancels the task.
    """

    def __init__(self) -> None:
        self.on_first: Callable[[], None] | None = None
        #: The signal that arrived before `on_first` was set; None if there was none.
        self.ended_loading: signal.Signals | None = None
        self._num_signals = 0
        self._before: dict[signal.Signals, Any] = {}  # earlier handlers, to restore

    def __enter__(self) -> "Stopper":
        task = asyncio.current_task()
        assert task is not None

        def on_signal(number: signal.Signals) -> None:
            self._num_signals += 1
            if self.on_first is None:
                self.ended_loading = number
            if self._num_signals == 1 and self.on_first is not None:
                self.on_first()
            else:
                task.cancel()

        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.getsignal(number)
            asyncio.get_running_loop().add_signal_handler(number, on_signal, number)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            asyncio.get_running_loop().remove_signal_handler(number)
            if handler is not None:  # None: not installed from Python
                # asyncio removes the handler of SIGTERM. Process 1 would then ignore the signal.
                signal.signal(number, handler)
