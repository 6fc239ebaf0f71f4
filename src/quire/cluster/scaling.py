"""Autoscaling: sets the number of engines of a fleet by the waiting time of prompts.

`ScalingRule` computes the wanted number from the time and the loads. `Autoscaler` asks it regularly
and scales the fleet.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from quire.engine_client.fleet_engines import FleetEngines
from quire.engine_client.loop_task import LoopTask
from quire.engine_client.recovery import EngineState
from quire.errors import ConfigurationError, QuireError
from quire.observability.log import get_logger

LOOK_EVERY_S = 0.5

SPARE_FILL = 0.75
"""An engine is ended only if the other engines would then use at most this share of their rows
(batch slots). Otherwise an engine would soon have to be started again."""

MISSED_RATIO = 3.0
"""An engine counts as missing after it has been recovering for this many times its start limit."""

RETRY_AFTER_S = 10.0
"""Seconds until a failed start or end of an engine is tried again."""

GONE = (EngineState.FAILED.value, EngineState.CLOSING.value)
"""States of engines that take no requests any more and are replaced."""

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ScalingConfig:
    """Bounds and thresholds of the number of engines."""

    #: Minimum number of engines.
    least: int
    #: The greatest number of engines.
    most: int
    #: Longest acceptable time, in seconds, that a new prompt waits for earlier prompts.
    wait_s: float
    #: An engine is added after the shortest wait was above wait_s, or the rows of all engines were
    #: full, for this many seconds.
    up_after_s: float = 2.0
    #: An engine is removed after the load was low for this many seconds. The load is low if, with
    #: one engine less, waits would be at most a quarter of wait_s, and at most SPARE_FILL of the
    #: rows would be in use.
    down_after_s: float = 60.0

    def check(self, num_engines: int) -> None:
        """Raises ConfigurationError if `num_engines` is outside the bounds, since scaling would
        undo it."""
        if not self.least <= num_engines <= self.most:
            raise ConfigurationError(
                f"num_replicas is {num_engines}, but autoscaling keeps it from {self.least} to"
                f" {self.most}; start the server with other replicas and max_replicas"
            )


class ScalingRule:
    """Decides when to add or remove an engine.

    Invariant: the wanted number is at most 1 away from the present one, and never leaves [least,
    most].
    """

    def __init__(self, config: ScalingConfig) -> None:
        self._config = config
        self._is_late_since_s: float | None = None
        self._is_idle_since_s: float | None = None

    def wanted(
        self, now_s: float, loads: Mapping[str, Mapping[str, float]], num_engines: int
    ) -> int:
        """The number of engines that the fleet should have. `loads` has the `Placement.load_of` of
        each engine that is ready and answers. While any engine starts, ends or is silent, returns
        `num_engines`."""
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
    """Scales one fleet by its load."""

    def __init__(self, engines: FleetEngines, config: ScalingConfig) -> None:
        super().__init__()
        self._engines = engines
        self._rule = ScalingRule(config)
        #: Loop time in seconds at which each recovering engine was first seen in that state.
        self._away_since_s: dict[str, float] = {}

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            try:
                await self._look(asyncio.get_running_loop().time())
                continue
            except (QuireError, OSError) as error:
                logger.error("scaling has failed, so the number of replicas stays: %s", error)
            except Exception:  # a start may fail in any way, and must not end the scaling
                logger.exception("scaling has failed, so the number of replicas stays")
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
            logger.info("scaling from %d to %d replicas", len(present), wanted)
            self._away_since_s.clear()  # scaling may take minutes, during which nothing is observed
            await self._engines.scale(wanted, missed)

    def _missed(self, now_s: float, overview: Mapping[str, Mapping[str, Any]]) -> list[str]:
        """Names of the engines that have been recovering for long while others serve: their nodes
        may be gone for good. If no engine serves, this machine may be cut off, so none counts as
        missing."""
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
