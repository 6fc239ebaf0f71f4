"""Base class of tasks that run in an event loop until they are stopped.

The periodic checks of a fleet derive from it: `scaling`, `slowness_poller`, `silence_watch`.
"""

import asyncio
from abc import ABC, abstractmethod

from quire.observability.log import get_logger

logger = get_logger(__name__)


class LoopTask(ABC):
    """Runs from `start` to `stop`. A failure is logged and ends the task."""

    def __init__(self) -> None:
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start the task."""
        self._task = asyncio.get_running_loop().create_task(self._run())
        self._task.add_done_callback(_tell_failure)

    async def stop(self) -> None:
        """Cancel the task and wait for its end. May be called twice, and without `start`."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    @abstractmethod
    async def _run(self) -> None:
        """Do the work of the task. Runs until it is cancelled."""


def _tell_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("a task of the fleet has failed, and runs no more", exc_info=error)
