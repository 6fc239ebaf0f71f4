"""Puts a fleet's engines to sleep, which frees their memory, and wakes them up.

An engine that sleeps has no process, or one without a model, so weights and KV cache are released
whatever holds them. Open requests and those that come meanwhile wait for the wake-up, and continue
from the tokens received so far. Made by `fleet`.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterable
from typing import Literal, TypeAlias

from quire.engine_client.fleet_dispatcher import FleetDispatcher
from quire.engine_client.fleet_engines import FleetEngines
from quire.engine_client.recovery import EngineState
from quire.errors import DeadlineExceededError, EngineDeadError, InvalidRequestError

SleepMode: TypeAlias = Literal["abort", "wait", "keep"]
"""How open requests are handled: they end with an error, end by themselves, or go on later."""

WAIT_POLL_S = 0.05

WAIT_S = 600.0
"""Maximum seconds for which a sleep waits for the end of open requests, unless the caller says."""


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

    async def sleep(self, mode: SleepMode, *, keeps_process: bool, wait_s: float = WAIT_S) -> None:
        """Release the memory of all engines that do not sleep yet.

        The mode "wait" waits at most `wait_s` seconds, and then raises DeadlineExceededError: the
        engines stay awake.

        With `keeps_process`, each has a process that waits with its libraries loaded, so that the
        wake-up takes less time. Raises InvalidRequestError for engines on other machines,
        EngineDeadError if an engine is not ready. If one dies meanwhile, the others may sleep.
        """
        async with self._changes:
            engines = [
                each for each in self._engines.all.values() if each.state is not EngineState.ASLEEP
            ]
            links = [link for each in engines if (link := each.supervisor.link) is not None]
            if len(links) < len(engines):
                raise EngineDeadError("an engine is not ready, so it can't be put to sleep")
            if not all(link.ends_process for link in links):
                raise InvalidRequestError(
                    "engines on other machines can't be put to sleep; end their agents instead"
                )
            replicas = list(self._dispatcher.replicas)
            accepting = [name for name, replica in replicas if not replica.is_closed]
            try:
                await self._settle(mode, wait_s)
                await _all_of(
                    each.supervisor.sleep(keeps_process=keeps_process) for each in engines
                )
            finally:
                for name in accepting:  # an engine that did not fall asleep takes requests again
                    self._dispatcher.set_accepting(name, True)

    async def wake(self) -> None:
        """Start the engines that sleep, and wait until they and those that recover take requests.
        Raises EngineDeadError if one does not start."""
        async with self._changes:
            coming = (EngineState.ASLEEP, EngineState.RECOVERING)
            engines = [each for each in self._engines.all.values() if each.state in coming]
            await _all_of(each.supervisor.wake() for each in engines)

    async def _settle(self, mode: SleepMode, wait_s: float) -> None:
        """End the open requests, or wait for their end, as `mode` says."""
        if mode == "abort":
            self._dispatcher.fail_all(
                EngineDeadError("the engine was put to sleep before the request had finished")
            )
        elif mode == "wait":
            for name in self._engines.all:  # new requests wait for the wake-up
                self._dispatcher.set_accepting(name, False)
            end_s = asyncio.get_running_loop().time() + wait_s
            while any(replica.requests for _, replica in self._dispatcher.replicas):
                if asyncio.get_running_loop().time() >= end_s:
                    raise DeadlineExceededError(
                        f"requests were open after {wait_s:g} s, so the engine stays awake"
                    )
                await asyncio.sleep(WAIT_POLL_S)


async def _all_of(changes: Iterable[Awaitable[None]]) -> None:
    """Wait for the end of all changes. Then raises the first error of them."""
    for found in await asyncio.gather(*changes, return_exceptions=True):
        if found is not None:
            raise found
