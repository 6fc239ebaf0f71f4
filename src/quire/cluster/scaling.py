"""How many engines a fleet has, by how long prompts wait.

`ScalingRule` is pure: it is told the time and the loads, and says a number. `Autoscaler` asks it
now and then, and has the fleet follow.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire.cluster.fleet_engines import FleetEngines
from quire.cluster.loop_task import LoopTask
from quire.engine_client.recovery import EngineState
from quire.errors import ConfigurationError, QuireError
from quire.observability.log import get_logger

LOOK_EVERY_S = 0.5

SPARE_FILL = 0.75
"""What an engine less would leave free is room for what may come, else it were started again."""

MISSED_RATIO = 3.0
"""An engine that was not ready for so many times what its start may take counts no more."""

RETRY_AFTER_S = 10.0
"""What could not be started, or ended, is tried again after so long."""

GONE = (EngineState.FAILED.value, EngineState.CLOSING.value)
"""States of engines that take no requests any more: others are started in their stead."""

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ScalingConfig:
    """least, most: engines. wait_s: that a new prompt may have to wait for those before it.

    up_after_s: one engine more when the shortest wait was longer for so long, or as many sequences
        were placed everywhere as run at once. down_after_s: one less when for so long one less
        would have had waits of at most a quarter of wait_s, and at most SPARE_FILL of its rows in
        use.
    """

    least: int
    most: int
    wait_s: float
    up_after_s: float = 2.0
    down_after_s: float = 60.0

    def check(self, num_engines: int) -> None:
        """Raises ConfigurationError for a number that would be undone."""
        if not self.least <= num_engines <= self.most:
            raise ConfigurationError(
                f"num_replicas is {num_engines}, but by their load there are {self.least} to"
                f" {self.most}; start the server with other replicas and max_replicas"
            )


class ScalingRule:
    """Invariant: what it says is within [least, most], and at most one away from what there is."""

    def __init__(self, config: ScalingConfig) -> None:
        self._config = config
        self._is_late_since_s: float | None = None
        self._is_idle_since_s: float | None = None

    def wanted(
        self, now_s: float, loads: Mapping[str, Mapping[str, float]], num_engines: int
    ) -> int:
        """How many engines there shall be. loads: of those that are ready and answer, as
        `Placement.load_of`; while others start, end or are silent, nothing is changed."""
        config = self._config
        if num_engines < config.least:
            return num_engines + 1
        if num_engines > config.most:
            return num_engines - 1
        if not loads or len(loads) < num_engines:
            self._is_late_since_s = self._is_idle_since_s = None
            return num_engines
        waits = [each.get("wait_s", 0.0) for each in loads.values()]
        fills = [each.get("fill", 0.0) for each in loads.values()]
        is_late = min(waits) > config.wait_s or min(fills) >= 1
        left = num_engines - 1
        is_idle = (
            left >= config.least
            and sum(waits) <= left * config.wait_s / 4
            and sum(fills) <= SPARE_FILL * left
        )
        self._is_late_since_s = self._since(self._is_late_since_s, is_late, now_s)
        self._is_idle_since_s = self._since(self._is_idle_since_s, is_idle, now_s)
        if self._has_lasted(self._is_late_since_s, config.up_after_s, now_s):
            self._is_late_since_s = None
            return min(config.most, num_engines + 1)
        if self._has_lasted(self._is_idle_since_s, config.down_after_s, now_s):
            self._is_idle_since_s = None
            return left
        return num_engines

    @staticmethod
    def _since(since_s: float | None, holds: bool, now_s: float) -> float | None:
        if not holds:
            return None
        return now_s if since_s is None else since_s

    @staticmethod
    def _has_lasted(since_s: float | None, seconds: float, now_s: float) -> bool:
        return since_s is not None and now_s - since_s >= seconds


class Autoscaler(LoopTask):
    """Looks at the load of one fleet."""

    def __init__(self, engines: FleetEngines, config: ScalingConfig) -> None:
        super().__init__()
        self._engines = engines
        self._rule = ScalingRule(config)
        self._away_since_s: dict[str, float] = {}

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            try:
                await self._look(asyncio.get_running_loop().time())
                continue
            except (QuireError, OSError) as error:
                logger.error("the number of replicas stays: %s", error)
            except Exception:  # of whatever starts engines: else nobody would look any more
                logger.exception("the number of replicas stays")
            await asyncio.sleep(RETRY_AFTER_S)

    async def _look(self, now_s: float) -> None:
        overview = {
            name: each
            for name, each in self._engines.overview().items()
            if each["state"] not in GONE
        }
        missed = self._missed(now_s, overview)
        present = {name: each for name, each in overview.items() if name not in missed}
        ready = {
            name: each
            for name, each in present.items()
            if each["state"] == EngineState.READY.value and not each["is_silent"]
        }
        wanted = self._rule.wanted(now_s, ready, len(present))
        if wanted != len(present):
            logger.info("replicas: %d, from now on %d", len(present), wanted)
            self._away_since_s.clear()  # it may take minutes, in which nobody looks
            await self._engines.scale(wanted, missed)

    def _missed(self, now_s: float, overview: Mapping[str, Mapping[str, Any]]) -> list[str]:
        """Those that have not come back for long, while others serve: their node may be gone for
        good. Where none serves, it is this machine that may be cut off, and all are waited for."""
        states = {name: each["state"] for name, each in overview.items()}
        away = [name for name, state in states.items() if state == EngineState.RECOVERING.value]
        if EngineState.READY.value not in states.values():
            away = []
        self._away_since_s = {name: self._away_since_s.get(name, now_s) for name in away}
        return [
            name
            for name, since_s in self._away_since_s.items()
            if now_s - since_s > MISSED_RATIO * self._engines.all[name].supervisor.build_limit_s
        ]
