"""Puts a fleet's engines to sleep, which frees their memory, and wakes them up.

An engine that sleeps has no process, or one without a model, so weights and KV cache are released
whatever holds them. Open requests and those that come meanwhile wait for the wake-up, and continue
from the tokens received so far. Made by `fleet`.
"""

import asyncio
import math
from collections.abc import Callable
from typing import Literal, TypeAlias

from quire.engine_client.fleet_dispatcher import FleetDispatcher
from quire.engine_client.fleet_engines import FleetEngines
from quire.engine_client.recovery import EngineState
from quire.errors import EngineDeadError, InvalidRequestError

SleepMode: TypeAlias = Literal["abort", "wait", "keep"]
"""How open requests are handled: they end with an error, end by themselves, or go on later."""

WAIT_POLL_S = 0.05


class FleetSleep:
    """The sleep of all engines of a fleet. Invariant: `sleep` and `wake` run one after another."""

    def __init__(self, engines: FleetEngines, dispatcher: FleetDispatcher) -> None:
        #: Called when a request comes while the engines sleep; None means that it waits.
        self.on_wanted: Callable[[], None] | None = None
        #: Time of the latest request by the loop's clock.
        self.last_request_s = -math.inf
        self._engines = engines
        self._dispatcher = dispatcher
        self._changes = asyncio.Lock()

    @property
    def is_on(self) -> bool:
        """Whether the engines sleep."""
        states = [engine.state for engine in self._engines.all.values()]
        return EngineState.ASLEEP in states and EngineState.READY not in states

    @property
    def awake_since_s(self) -> float:
        """Time of the last wake-up by the loop's clock; minus infinity before the first."""
        times = [engine.supervisor.awake_since_s for engine in self._engines.all.values()]
        return max(times, default=-math.inf)

    def note_request(self) -> None:
        """Record that a request has come."""
        self.last_request_s = asyncio.get_running_loop().time()
        if self.on_wanted is not None and self.is_on:
            self.on_wanted()

    async def sleep(self, mode: SleepMode, *, keeps_process: bool) -> None:
        """Release the memory of all engines; does nothing if they sleep.

        With `keeps_process`, each has a process that waits with its libraries loaded, so that the
        wake-up takes less time. Raises InvalidRequestError for engines on other machines,
        EngineDeadError if an engine is not ready.
        """
        async with self._changes:
            engines = list(self._engines.all.values())
            if self.is_on:
                return
            links = [link for each in engines if (link := each.supervisor.link) is not None]
            if len(links) < len(engines):
                raise EngineDeadError("an engine is not ready, so it can't be put to sleep")
            if not all(link.ends_process for link in links):
                raise InvalidRequestError(
                    "engines on other machines can't be put to sleep; end their agents instead"
                )
            await self._settle(mode)
            await asyncio.gather(
                *(each.supervisor.sleep(keeps_process=keeps_process) for each in engines)
            )

    async def wake(self) -> None:
        """Start the engines again, and wait until they take requests; does nothing if they are
        awake. Raises EngineDeadError if one does not start."""
        async with self._changes:
            if not self.is_on:
                return
            await asyncio.gather(*(each.supervisor.wake() for each in self._engines.all.values()))

    async def _settle(self, mode: SleepMode) -> None:
        """End the open requests, or wait for their end, as `mode` says."""
        if mode == "abort":
            self._dispatcher.fail_all(
                EngineDeadError("the engine was put to sleep before the request had finished")
            )
        elif mode == "wait":
            for name in self._engines.all:  # new requests wait for the wake-up
                self._dispatcher.set_accepting(name, False)
            while any(replica.requests for _, replica in self._dispatcher.replicas):
                await asyncio.sleep(WAIT_POLL_S)
