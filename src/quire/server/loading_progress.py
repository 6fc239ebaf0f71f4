"""Shows the progress of loading the model, on a terminal or in the log.

Called by `launch` for each progress report of the engine.
"""

import contextlib
import threading
import time
from collections.abc import Callable
from typing import TextIO

from tqdm import tqdm

BAR_FORMAT = "{desc} [{bar:30}] {percentage:3.0f}%"
REDRAW_S = 0.1
QUIET_S = 2.0
"""Without a terminal, loading that takes less than this time is not reported."""
LINE_EVERY_PERCENT = 25


class LoadingBar(tqdm):  # type: ignore[type-arg]  # it cannot be subscripted when run
    """tqdm's bar without a monitor thread, which would outlive the bar, or a process lock."""

    monitor_interval = 0


LoadingBar.set_lock(threading.RLock())


class LoadingProgress:
    """Shows progress. Call it with (text, done, total); a total of 0 means an unknown total.

    If the stream is closed, full or missing, nothing is shown and loading continues.
    """

    def __init__(
        self,
        stream: TextIO | None,
        clock: Callable[[], float] = time.monotonic,
        log_line: Callable[[str], None] | None = None,
    ) -> None:
        """With `log_line`, lines are passed to this function instead of written to the stream."""
        self._log_line = log_line
        stream = stream if log_line is None else None
        self._stream = stream
        self._clock = clock
        self._is_terminal = stream is not None and stream.isatty()
        #: The bar of the current text on a terminal; None before the first and after the last.
        self._bar: LoadingBar | None = None
        self._started_s: float | None = None
        self._text = ""
        self._next_percent = 0

    def __call__(self, text: str, done: int, total: int) -> None:
        if self._started_s is None:
            self._started_s = self._clock()
        if text != self._text:
            self.close()
            self._text, self._next_percent = text, 0
        if self._is_terminal:
            with contextlib.suppress(OSError, ValueError):
                self._draw(done, total)
        elif self._clock() - self._started_s >= QUIET_S:
            self._write_line(done, total)

    def close(self) -> None:
        """Erase the bar. May be called twice."""
        bar, self._bar = self._bar, None
        if bar is not None:
            with contextlib.suppress(OSError, ValueError):
                bar.close()

    def _draw(self, done: int, total: int) -> None:
        if self._bar is None:
            self._bar = LoadingBar(
                desc=self._text,
                total=total or None,
                initial=done,
                leave=False,
                file=self._stream,
                mininterval=REDRAW_S,
                bar_format=BAR_FORMAT if total else "{desc}",
            )
        self._bar.update(done - self._bar.n)
        if done == total:  # the full bar is always drawn
            self._bar.refresh()

    def _write_line(self, done: int, total: int) -> None:
        percent = 100 * done // total if total else 0
        if percent < self._next_percent:
            return
        self._next_percent = percent - percent % LINE_EVERY_PERCENT + LINE_EVERY_PERCENT
        line = f"{self._text}: {percent}%" if total else self._text
        if self._log_line is not None:
            self._log_line(line)
        else:
            self._write(f"{line}\n")

    def _write(self, text: str) -> None:
        if self._stream is None:
            return
        with contextlib.suppress(OSError, ValueError):
            self._stream.write(text)
            self._stream.flush()
