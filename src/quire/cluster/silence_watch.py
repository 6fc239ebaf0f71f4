"""Moves requests away from replicas that have stopped answering.

A replica is one engine of the fleet, in its own process. An engine answers a ping between two
steps. An engine counts as silent if it leaves a ping unanswered for several times its longest step
and uses no CPU time. Such an engine is assumed to be frozen (SIGSTOP, a frozen container), swapped
out, or waiting for a device or a file server. Its requests continue in other replicas, and it gets
no new requests until it answers. Its process is killed only when its step counts as hanging
(`EngineLink.watch`), since a new process has to load the model.

An engine that answers no ping but uses CPU time is assumed to be in a step that never ends, perhaps
because of one of its requests. Its requests are not moved, since that request could block other
replicas, too. After the process is killed, `failover` finds that request. Created by
`fleet`.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from quire.cluster.longest_step import longest_step_s
from quire.core.sampling_params import ModelLimits
from quire.engine_client.fleet_dispatcher import FleetDispatcher
from quire.engine_client.fleet_engine import FleetEngine
from quire.engine_client.fleet_engines import FleetEngines
from quire.engine_client.loop_task import LoopTask
from quire.engine_client.process.link import EngineLink
from quire.engine_client.request_book import OpenRequest
from quire.observability.log import get_logger
from quire.observability.machine_processors import processor_s

PING_EVERY_S = 0.5
STEP_FACTOR = 3.0
"""An engine may be silent for this many times its longest predicted step."""
LEAST_SILENCE_S = 5.0
"""Seconds for which any engine with known step times may be silent, even if its steps are short."""
MOST_SILENCE_S = 15.0
"""Maximum seconds of silence for an engine whose CPU time is known. A step may take longer: its CPU
time then distinguishes it from a frozen process."""
BUSY_SHARE = 0.1
"""An engine counts as computing if it used at least this share of one processor since the ping."""

logger = get_logger(__name__)


def silence_limit_s(
    limits: ModelLimits, facts: Mapping[str, Any], slowness: float, *, knows_processor_time: bool
) -> float | None:
    """Seconds for which an engine may leave a ping unanswered; None means without limit.

    `slowness` is the ratio of the engine's measured to its predicted step times.
    """
    most_s = MOST_SILENCE_S if knows_processor_time else None
    step_s = longest_step_s(limits, facts)
    if not step_s:
        return most_s
    limit_s = max(LEAST_SILENCE_S, STEP_FACTOR * max(1.0, slowness) * step_s)
    return limit_s if most_s is None else min(limit_s, most_s)


@dataclass(frozen=True, slots=True)
class _Ping:
    """A ping that has not been answered."""

    link: EngineLink
    sent_s: float
    #: Processor time of the engine when the ping was sent; None if unknown.
    processor_s: float | None

    def has_computed(self, now_s: float) -> bool:
        """Whether the process has used at least BUSY_SHARE of a processor since the ping."""
        if self.processor_s is None or (used_s := processor_s(self.link.pid)) is None:
            return False
        return used_s - self.processor_s >= BUSY_SHARE * (now_s - self.sent_s)


class SilentReplicas:
    """The replicas that have stopped answering, and the requests that were moved away from them.

    A request is moved for silence at most once. If the request itself blocks a replica, it blocks
    the next replica, too, and is found to be the cause when the next replica is killed.
    """

    def __init__(self, dispatcher: FleetDispatcher) -> None:
        self._dispatcher = dispatcher
        #: Ids of the requests that were moved for silence.
        self._have_left: set[str] = set()

    def set_silent(self, name: str, is_silent: bool) -> None:
        """Record whether a ready replica has stopped answering. Called repeatedly while the replica
        is silent, because another replica that can take its requests may appear later."""
        dispatcher = self._dispatcher
        replica = dispatcher.replicas.get(name)
        if replica is None:
            return
        if replica.is_silent is not is_silent:
            replica.is_silent = is_silent
            logger.warning("replica %s %s", name, "is silent" if is_silent else "answers again")
            dispatcher.set_accepting(name, not replica.is_closed)
        if is_silent:
            self._have_left = {
                each for each in self._have_left if dispatcher.replicas.name_for(each)
            }
            for request in list(replica.requests.values()):
                self._move(request)

    def _move(self, request: OpenRequest) -> None:
        dispatcher, request_id = self._dispatcher, request.request_id
        if request_id in self._have_left or request is dispatcher.trials.attribution.trial:
            return
        before = dispatcher.replicas.name_for(request_id)
        dispatcher.move(request)
        if dispatcher.replicas.name_for(request_id) != before:
            self._have_left.add(request_id)


class SilenceWatch(LoopTask):
    """Pings the engines of a fleet, and marks engines that don't answer as silent.

    Invariant: each ready engine has at most one ping in `_unanswered`, sent over its present link.
    """

    def __init__(self, engines: FleetEngines, dispatcher: FleetDispatcher) -> None:
        super().__init__()
        self._engines = engines
        self._placement = dispatcher.placement
        self._silent = SilentReplicas(dispatcher)
        self._unanswered: dict[str, _Ping] = {}

    async def _run(self) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            slept_s = clock()
            await asyncio.sleep(PING_EVERY_S)
            if clock() - slept_s > 2 * PING_EVERY_S:
                # This process itself was stopped, so unread answers may be waiting. Start all pings
                # anew.
                self._unanswered.clear()
            for engine in self._engines.ready:
                self._look(engine, clock)

    def _look(self, engine: FleetEngine, clock: Callable[[], float]) -> None:
        link = engine.supervisor.link
        assert link is not None, "it is ready"
        ping = self._unanswered.get(engine.name)
        if ping is None or ping.link is not link:
            self._unanswered[engine.name] = ping = _Ping(link, clock(), processor_s(link.pid))
            link.call_between_steps(lambda: self._on_answer(engine.name, ping))
            return
        limit_s = silence_limit_s(
            engine.limits,
            engine.facts,
            self._placement.load_of(engine.name).get("slowness", 1.0),
            knows_processor_time=ping.processor_s is not None,
        )
        is_late = limit_s is not None and clock() - ping.sent_s >= limit_s
        if is_late and not ping.has_computed(clock()):
            self._silent.set_silent(engine.name, True)

    def _on_answer(self, name: str, ping: _Ping) -> None:
        if self._unanswered.get(name) is ping:
            del self._unanswered[name]
            self._silent.set_silent(name, False)
