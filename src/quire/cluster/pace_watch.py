"""Tells the router how fast the engines of a fleet really are.

Each engine measures what steps take when it starts, and routing goes by that. Later it may be
slower: others use its machine, or its processor is hot. So every few seconds each is asked how many
times as long its last steps took (`engine.utilization`). Made by `fleet`.
"""

import asyncio

from quire.cluster.fleet_dispatcher import Placement
from quire.cluster.fleet_engine import FleetEngine
from quire.cluster.fleet_engines import FleetEngines
from quire.cluster.loop_task import LoopTask
from quire.errors import EngineDeadError

ASK_EVERY_S = 5.0
"""As long as what engines count as recent."""
ANSWER_LIMIT_S = 5.0
FORGET_AFTER = 12
"""Times in a row that an engine had too few steps to tell: it may be fast again by then, and would
get no requests by which to show it."""


class PaceWatch(LoopTask):
    """Asks the engines of one fleet."""

    def __init__(self, engines: FleetEngines, placement: Placement) -> None:
        super().__init__()
        self._engines = engines
        self._placement = placement
        self._num_silent: dict[str, int] = {}

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
