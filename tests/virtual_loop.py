"""An event loop whose time is virtual: it jumps to the next timer when nothing else can run.

Scenarios of sleeps and deadlines take no time in it, and a busy machine changes nothing. It is for
code whose only waits are those of asyncio: no threads, sockets or processes.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any

TICK_S = 1e-6
"""The virtual seconds between two readings of the clock, so that no two events tie."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """Invariant: `time()` grows with each call, and never runs behind a timer that has run."""

    def __init__(self) -> None:
        super().__init__()
        self._now_s = 0.0

    def time(self) -> float:
        """Virtual seconds since the loop was made."""
        self._now_s += TICK_S
        return self._now_s

    def _run_once(self) -> None:
        if not self._ready and self._scheduled:
            self._now_s = max(self._now_s, self._scheduled[0].when())
        super()._run_once()


def run_virtually(main: Coroutine[Any, Any, None]) -> None:
    """`asyncio.run` in virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(main)
