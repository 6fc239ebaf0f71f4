"""Starts, compares, drains, restarts and removes the engines of a fleet.

A new engine joins only if its weights, code and options equal those of the first engine (see
`identity`), so that each engine can continue the requests of any other. Made by `fleet`.
"""

import asyncio
from collections.abc import Awaitable, Collection, Mapping
from functools import partial
from itertools import count
from typing import Any

from quire.core.sampling_params import ModelLimits
from quire.engine_client.engine_slot import EngineSlot, EngineSlots
from quire.engine_client.fleet_dispatcher import FleetDispatcher
from quire.engine_client.fleet_engine import FleetEngine
from quire.engine_client.identity import check_same
from quire.engine_client.messages import OnProgress
from quire.engine_client.process.link import EngineLink
from quire.engine_client.recovery import Death, EngineState, RecoveryConfig
from quire.errors import ConfigurationError, EngineDeadError, QuireError
from quire.observability.log import get_logger

PLACE_LIMIT_S = 60.0
"""Additional seconds for the start of an engine whose slot has to be allocated first."""

DRAIN_POLL_S = 0.05

logger = get_logger(__name__)


class FleetEngines:
    """Holds all engines of a fleet, and handles their events as their `FleetEngineOwner`.

    Invariant: `add`, `remove`, `restart` and `scale` run one after another.
    """

    def __init__(
        self,
        options: Mapping[str, object],
        dispatcher: FleetDispatcher,
        slots: EngineSlots,
        recovery: RecoveryConfig,
        on_progress: OnProgress | None,
    ) -> None:
        """Starts no engine yet; each engine will get `options`."""
        self.all: dict[str, FleetEngine] = {}
        #: The limits of the first ready engine, which all later engines must match; None until an
        #: engine is ready.
        self.limits: ModelLimits | None = None
        #: The first ready engine's report about itself; empty until an engine is ready.
        self.facts: Mapping[str, Any] = {}
        #: Completed, with the reason as result, once all engines have failed for good.
        self.failed: asyncio.Future[QuireError] = asyncio.get_running_loop().create_future()
        self.is_closing = False
        #: The slots in which engines can be started.
        self.slots = slots
        self._options = dict(options)
        self._dispatcher = dispatcher
        self._recovery = recovery
        self._on_progress = on_progress
        # Seconds without progress after which the start of a later engine fails; None before the
        # first engine is ready.
        self._start_limit_s: float | None = None
        #: Names of the engines that are being ended on purpose.
        self._ending: set[str] = set()
        #: Maps the name of each lost engine to its engine id and the ids of its open requests.
        self._lost: dict[str, tuple[str, list[str]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._changes = asyncio.Lock()

    @property
    def ready(self) -> list[FleetEngine]:
        """The engines that take requests."""
        return [each for each in self.all.values() if each.state is EngineState.READY]

    def find(self, name: str) -> FleetEngine:
        """The engine of this name. Raises ConfigurationError for an unknown name."""
        if name not in self.all:
            names = ", ".join(self.all)
            raise ConfigurationError(f"there is no replica {name!r:.80}; there are {names}")
        return self.all[name]

    async def start(self) -> ModelLimits:
        """Start the first engine, then the others with the same limits, and wait until all are
        ready. Returns their limits.

        Raises ReplicaDiffersError, or the error of an engine that can't be built.
        """
        first, *others = self.slots.initial()
        async with self._changes:
            await self._add(first)
            await asyncio.gather(*[self._add(slot) for slot in others])
        assert self.limits is not None, "the first engine was ready"
        return self.limits

    async def _add(self, slot: EngineSlot) -> None:
        """Start an engine and wait until it takes requests. Raises the errors of `start`, after
        removing the engine and freeing its slot."""
        if self.is_closing:
            self.slots.release(slot.name)
            raise EngineDeadError("the fleet is being shut down, so no engine is started")
        settled: dict[str, object] = {}
        if self.limits is not None:
            # The first engine chose its length by its free memory. All others must use the same
            # length.
            settled["max_model_len"] = self.limits.max_model_len
        # Each sign of progress postpones the deadline, so only an engine that is stuck misses it.
        limit_s, limit = self._start_limit_s, asyncio.timeout(None)
        engine = FleetEngine(
            slot.name,
            {**self._options, **settled, **slot.options},
            slot.open_link,
            self._recovery,
            self,
            partial(self._dispatcher.on_message, slot.name),
            self._on_progress if limit_s is None else lambda *_: _extend(limit, limit_s),
        )
        self.all[slot.name] = engine
        try:
            async with limit:
                _extend(limit, limit_s)
                await engine.start()
            if engine.refusal is not None:
                raise engine.refusal
        except BaseException as error:
            await self._end(slot.name)
            if isinstance(error, QuireError):
                self._fail_unless_any_comes_back(error)  # the others may all have failed
            if isinstance(error, TimeoutError) and limit.expired():
                raise EngineDeadError(
                    f"replica {slot.name!r} has come no further for {limit_s:g} s, and is not"
                    " ready; its log says how far it came"
                ) from error
            raise

    async def drain(self, name: str, timeout_s: float) -> None:
        """Give an engine no new requests and wait until its open requests have ended. After
        `timeout_s` its open requests move to other engines. If no other engine takes requests,
        `drain` returns at once, and the requests stay. Raises ConfigurationError for an unknown
        name."""
        self.find(name)
        self._dispatcher.set_accepting(name, False)
        loop = asyncio.get_running_loop()
        until_s = loop.time() + timeout_s
        while loop.time() < until_s and (replica := self._dispatcher.replicas.get(name)):
            if not replica.requests or not self._dispatcher.takes_any():
                break
            await asyncio.sleep(DRAIN_POLL_S)
        self._dispatcher.move_all(name)

    async def remove(self, name: str, timeout_s: float = 0.0) -> None:
        """Drain an engine and end it. Clients see only a pause in their streams. Raises
        ConfigurationError for an unknown name, or if no other engine is ready and answers."""
        async with self._changes:
            await self._remove(name, timeout_s)

    async def _remove(self, name: str, timeout_s: float = 0.0) -> None:
        _check_spare(self, name)
        await self.drain(name, timeout_s)
        try:
            _check_spare(self, name)  # the other engines may have died meanwhile
        except ConfigurationError:
            self._dispatcher.set_accepting(name, True)
            raise
        await self._end(name)

    async def _end(self, name: str) -> None:
        """End an engine for good, whatever its state."""
        engine = self.all[name]
        self._ending.add(name)
        try:
            await engine.shutdown(drain=False, timeout_s=0.0, reason=None)
        finally:
            del self.all[name]
            self._ending.discard(name)
            self.slots.release(name)

    async def restart(self, name: str, timeout_s: float = 0.0) -> None:
        """Drain an engine and restart its process; returns when it is ready again. Raises
        ConfigurationError for an unknown name, EngineDeadError if it does not come back."""
        async with self._changes:
            engine = self.find(name)
            await self.drain(name, timeout_s)
            await engine.supervisor.renew()

    async def scale(self, num_engines: int, without: Collection[str] = ()) -> None:
        """Start engines, or drain and end the newest ones, until there are `num_engines`. First
        ends engines that have failed for good, and engines named in `without` that are not ready.
        Raises ConfigurationError if there is no slot for one more engine, or the error of an engine
        that can't be built."""
        async with self._changes:
            for engine in list(self.all.values()):
                is_missed = engine.name in without and engine.state is EngineState.RECOVERING
                if is_missed or not _comes_back(engine):
                    await self._end(engine.name)
            while len(self.all) < num_engines:
                name = next(str(n) for n in count() if str(n) not in self.all)
                await self._add(self.slots.allocate(name))
            while len(self.all) > num_engines:
                await self._remove(list(self.all)[-1])

    def overview(self) -> dict[str, dict[str, Any]]:
        """State and load of each engine by name, for display."""
        found: dict[str, dict[str, Any]] = {}
        for name, engine in self.all.items():
            replica = self._dispatcher.replicas.get(name)
            found[name] = {
                "state": engine.state.value,
                "is_silent": replica is not None and replica.is_silent,
                "num_open": 0 if replica is None else replica.num_branches,
                "num_restarts": engine.num_restarts,
                "num_requested_restarts": engine.num_requested_restarts,
                "pid": engine.pid,
                **self._dispatcher.placement.load_of(name),
            }
        return found

    async def shutdown(self, *, drain: bool, timeout_s: float, reason: QuireError | None) -> None:
        """End all engines. With `drain`, they finish their open requests first. Engines that still
        run after `timeout_s` are killed."""
        self.is_closing = self._dispatcher.is_ending = True
        ending = [
            engine.shutdown(drain=drain, timeout_s=timeout_s, reason=reason)
            for engine in self.all.values()
        ]
        await asyncio.gather(*ending)

    # ---- for the engines --------------------------------------------------------------------

    def on_ready(self, engine: FleetEngine, link: EngineLink) -> None:
        """See `FleetEngineOwner`."""
        if self.limits is None:
            self.limits, self.facts = engine.limits, engine.facts
            self._start_limit_s = engine.supervisor.build_limit_s + PLACE_LIMIT_S
        # An engine that computes something else must not take over requests of the others.
        engine.refusal = check_same(
            engine.name, (self.limits, self.facts), (engine.limits, engine.facts)
        )
        if engine.refusal is not None:
            logger.error("%s", engine.refusal)
            self._later(engine.shutdown(drain=False, timeout_s=0.0, reason=None))
            return
        engine_id, request_ids = self._lost.pop(engine.name, ("", []))
        # The process was only unreachable and is still alive, so no request has killed it.
        if engine_id and engine_id == engine.facts.get("engine_id"):
            self._dispatcher.undo_losses(request_ids)
        self._dispatcher.on_ready(engine.name, link, engine.limits, engine.facts)

    def on_death(self, engine: FleetEngine, death: Death) -> frozenset[Death]:
        """See `FleetEngineOwner`."""
        replica = self._dispatcher.replicas.get(engine.name)
        if death.is_lost and replica is not None:
            engine_id = str(engine.facts.get("engine_id", ""))
            self._lost[engine.name] = engine_id, list(replica.requests)
        return self._dispatcher.on_death(engine.name, death)

    def on_end(self, engine: FleetEngine, error: QuireError) -> None:
        """See `FleetEngineOwner`. The fleet fails when its last engine ends."""
        self._dispatcher.on_gone(engine.name)
        if not self.is_closing and engine.name not in self._ending:
            reason = engine.supervisor.failure or engine.refusal or error
            self._fail_unless_any_comes_back(reason, beside=engine)

    def _fail_unless_any_comes_back(
        self, reason: QuireError, beside: FleetEngine | None = None
    ) -> None:
        if any(_comes_back(each) for each in self.all.values() if each is not beside):
            return
        if not self.failed.done() and self.limits is not None:
            self.failed.set_result(reason)
            self._dispatcher.on_end(
                EngineDeadError("all engines have failed for good; the server's log says how")
            )

    def _later(self, work: Awaitable[None]) -> None:
        async def run() -> None:
            await work

        task = asyncio.get_running_loop().create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _extend(limit: asyncio.Timeout, limit_s: float | None) -> None:
    """Move a start's deadline to `limit_s` from now, unless it has passed. None changes nothing."""
    if limit_s is not None and not limit.expired():
        limit.reschedule(asyncio.get_running_loop().time() + limit_s)


def _comes_back(engine: FleetEngine) -> bool:
    """True if an engine takes requests or may recover."""
    return engine.state not in (EngineState.FAILED, EngineState.CLOSING)


def _check_spare(engines: FleetEngines, name: str) -> None:
    """Raises ConfigurationError unless another engine takes requests."""
    engine = engines.find(name)
    others = [each for each in engines.all.values() if each is not engine and _comes_back(each)]
    silent = {each for each, replica in engines._dispatcher.replicas if replica.is_silent}
    if [each for each in engines.ready if each.name not in silent] == [engine] or not others:
        raise ConfigurationError(
            f"replica {name!r} is the only one that takes requests, so it stays; start another"
            " one, or end the server"
        )


def any_ready(engines: FleetEngines) -> FleetEngine:
    """The first ready engine. Raises EngineDeadError if no engine is ready."""
    if not engines.ready:
        raise EngineDeadError("no engine is ready; ask once more in a moment")
    return engines.ready[0]
