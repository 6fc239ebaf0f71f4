"""Asks the engines of a fleet how slow their steps have become, and informs the router.

Each engine measures its step times when it starts, and routing relies on them. Later the engine may
be slower, because other programs use its machine or its processor is hot. So every few seconds each
engine reports the ratio of its recent to its initial step times (`engine.utilization`). Made by
`fleet`.
"""

import asyncio

from quire.engine_client.fleet_dispatcher import Placement
from quire.engine_client.fleet_engine import FleetEngine
from quire.engine_client.fleet_engines import FleetEngines
from quire.engine_client.loop_task import LoopTask
from quire.errors import EngineDeadError

ASK_EVERY_S = 5.0
"""Seconds between questions to an engine. Engines use the same period to define recent steps."""
ANSWER_LIMIT_S = 5.0
FORGET_AFTER = 12
"""After this many consecutive answers without enough steps to measure, an engine counts as fast
again. It may have recovered, but an engine without requests can't show that."""


class SlownessPoller(LoopTask):
    """Asks the engines of one fleet for their slowness, the ratio of recent to initial step
    times."""

    def __init__(self, engines: FleetEngines, placement: Placement) -> None:
        super().__init__()
        self._engines = engines
        self._placement = placement
        #: Number of consecutive answers without a slowness, by the engine's name.
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
            return  # an engine that is dead or in a long step does not answer
        slowness = stats.get("utilization", {}).get("slowness")
        if slowness is not None:
            self._num_silent[engine.name] = 0
            self._placement.set_slowness(engine.name, float(slowness))
            return
        self._num_silent[engine.name] += 1
        if self._num_silent[engine.name] == FORGET_AFTER:
            self._placement.set_slowness(engine.name, 1.0)
