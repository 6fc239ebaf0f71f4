"""A task of an event loop that goes on until it is stopped.

Made by what watches a fleet: `scaling`, `pace_watch`.
"""

import asyncio
from abc import ABC, abstractmethod

from quire.observability.log import get_logger

logger = get_logger(__name__)


class LoopTask(ABC):
    """From `start` to `stop`. One that fails is told in the log, and runs no more."""

    def __init__(self) -> None:
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin."""
        self._task = asyncio.get_running_loop().create_task(self._run())
        self._task.add_done_callback(_tell_failure)

    async def stop(self) -> None:
        """May be called twice, and without `start`."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    @abstractmethod
    async def _run(self) -> None:
        """Without end."""


def _tell_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        logger.error("a task of the fleet has failed, and runs no more", exc_info=error)
