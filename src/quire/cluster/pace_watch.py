"""Tells the router how fast the engines of a fleet really are.

Each engine measures what steps take when it starts, and routing goes by that. Later it may be
slower: others use its machine, or its processor is hot. So every few seconds each is asked how many
times as long its last steps took (`engine.utilization`). Made by `fleet`.
"""

import asyncio

from quire.cluster.fleet_dispatcher import Placement
from quire.cluster.fleet_engine import FleetEngine
from quire.cluster.fleet_engines import FleetEngines
from quire.errors import EngineDeadError
from quire.observability.log import get_logger

ASK_EVERY_S = 5.0
"""As long as what engines count as recent."""
ANSWER_LIMIT_S = 5.0
FORGET_AFTER = 12
"""Times in a row that an engine had too few steps to tell: it may be fast again by then, and would
get no requests by which to show it."""

logger = get_logger(__name__)


class PaceWatch:
    """A task of one fleet's event loop, from `start` to `stop`."""

    def __init__(self, engines: FleetEngines, placement: Placement) -> None:
        self._engines = engines
        self._placement = placement
        self._task: asyncio.Task[None] | None = None
        self._num_silent: dict[str, int] = {}

    def start(self) -> None:
        """Begin to ask."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    async def stop(self) -> None:
        """Ask no more. May be called twice."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(ASK_EVERY_S)
            ready = self._engines.ready
            self._num_silent = {each.name: self._num_silent.get(each.name, 0) for each in ready}
            await asyncio.gather(*map(self._ask, ready))

    async def _ask(self, engine: FleetEngine) -> None:
        try:
            stats = await engine.stats(ANSWER_LIMIT_S)
        except (EngineDeadError, TimeoutError):
            return  # it has gone, or is at a long step: nothing is known
        slowness = stats.get("utilization", {}).get("slowness")
        if slowness is not None:
            self._num_silent[engine.name] = 0
            self._placement.set_slowness(engine.name, float(slowness))
            return
        self._num_silent[engine.name] += 1
        if self._num_silent[engine.name] == FORGET_AFTER:
            self._placement.set_slowness(engine.name, 1.0)
