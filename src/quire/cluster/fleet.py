"""Several engines of one model as one: what a server has in place of an `AsyncEngine`.

    Replica           one engine each, behind a supervisor that starts it again
    FleetDispatcher   whose requests are where, and where they go when an engine dies
    Placement         which engine gets a request

A replica joins once it has shown that it computes what the others do, to the bit. Those that don't
are refused. Knows no HTTP, no text and no torch. Called by `server`.
"""

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from quire.cluster.fleet_dispatcher import FleetDispatcher, Placement
from quire.cluster.identity import check_same
from quire.cluster.replica import Replica
from quire.core.adapters import AdapterRef
from quire.core.request import Request
from quire.core.sampling_params import ModelLimits
from quire.engine_client.messages import (
    Control,
    GetStats,
    OnProgress,
    Outputs,
    Ping,
    Question,
    RequestFailed,
)
from quire.engine_client.process.link import EngineLink, OpenLink
from quire.engine_client.recovery import Death, EngineState, RecoveryConfig
from quire.engine_client.request_book import OutputSink, RequestStream
from quire.errors import ConfigurationError, EngineDeadError, QuireError
from quire.observability.log import get_logger

DRAIN_POLL_S = 0.05

logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a replica is started. options: of its engine, beside those of the whole fleet."""

    name: str
    open_link: OpenLink
    options: Mapping[str, object] = field(default_factory=dict)


class Fleet:
    """A `ServedEngine`. Belongs to one event loop."""

    def __init__(
        self,
        options: Mapping[str, object],
        placement: Placement,
        *,
        max_queued_requests: int,
        recovery: RecoveryConfig,
        on_progress: OnProgress | None = None,
    ) -> None:
        """Has no replicas yet: `start` and `add` start some. options: of every engine."""
        loop = asyncio.get_running_loop()
        self.dispatcher = FleetDispatcher(max_queued_requests, loop.time, placement)
        self.replicas: dict[str, Replica] = {}
        self._options = dict(options)
        self._recovery = recovery
        self._on_progress = on_progress
        self._limits: ModelLimits | None = None
        self._facts: Mapping[str, Any] = {}
        self._failed: asyncio.Future[QuireError] = loop.create_future()
        self._is_closing = False
        self._ending: set[str] = set()  # replicas that are ended on purpose
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, places: Sequence[Place]) -> None:
        """Start the first engine, then the others as it was settled; wait until all are ready.

        Raises what the engines can't be built with, and ConfigurationError for one that differs;
        then, and when it is cancelled, no process is left.
        """
        try:
            await self.add(places[0])
            await asyncio.gather(*[self.add(place) for place in places[1:]])
        except BaseException:
            await self.shutdown(drain=False, timeout_s=0.0)
            raise

    async def add(self, place: Place) -> None:
        """Start a replica and wait until it takes requests. Raises as `start` does; then the fleet
        is without it."""
        settled: dict[str, object] = {}
        if self._limits is not None:
            # What the first engine chose by the memory that it found, the others have, too.
            settled["max_model_len"] = self._limits.max_model_len
        replica = Replica(
            place.name,
            {**self._options, **settled, **place.options},
            place.open_link,
            self._recovery,
            self,
            self._on_progress if self._limits is None else None,
        )
        self.replicas[place.name] = replica
        try:
            await replica.start()
            if replica.refusal is not None:
                raise replica.refusal
        except BaseException:
            self._ending.add(place.name)
            await replica.shutdown(drain=False, timeout_s=0.0, reason=None)
            self.replicas.pop(place.name, None)
            self._ending.discard(place.name)
            raise

    # ---- what it is -------------------------------------------------------------------------

    @property
    def views(self) -> Mapping[str, Replica]:
        """Its replicas by name."""
        return self.replicas

    @property
    def state(self) -> EngineState:
        """READY while any replica is."""
        if self._is_closing:
            return EngineState.CLOSING
        if self._failed.done():
            return EngineState.FAILED
        states = {replica.state for replica in self.replicas.values()}
        if EngineState.READY in states:
            return EngineState.READY
        return EngineState.STARTING if self._limits is None else EngineState.RECOVERING

    @property
    def failure(self) -> QuireError | None:
        """Why all of it has failed for good; None if it has not."""
        return self._failed.result() if self._failed.done() else None

    @property
    def limits(self) -> ModelLimits:
        """What every engine was built for."""
        assert self._limits is not None, "no replica was ever ready"
        return self._limits

    @property
    def facts(self) -> Mapping[str, Any]:
        """Of the first replica, but for rows, which are those of all that are ready."""
        ready = [each for each in self.replicas.values() if each.state is EngineState.READY]
        rows = sum(int(each.facts.get("max_num_seqs", 0)) for each in ready)
        return {**self._facts, "max_num_seqs": rows or self._facts.get("max_num_seqs")}

    @property
    def num_restarts(self) -> int:
        """Processes that were started after the first, of all replicas that there are."""
        return sum(replica.num_restarts for replica in self.replicas.values())

    @property
    def is_alive(self) -> bool:
        """Whether it takes requests: now, or as soon as a replica has recovered."""
        return self.state in (EngineState.READY, EngineState.RECOVERING)

    @property
    def pid(self) -> int | None:
        """None: each replica has its own."""
        return None

    @property
    def num_open(self) -> int:
        """Branches of requests whose end has not come yet."""
        return self.dispatcher.num_open

    @property
    def last_step_age_s(self) -> float:
        """Of the replica that was silent for the shortest time: see `AsyncEngine`."""
        return min((each.last_step_age_s for each in self.replicas.values()), default=0.0)

    # ---- what it does -----------------------------------------------------------------------

    def check_room(self, num_generations: int) -> None:
        """See `AsyncEngine.check_room`."""
        self._check_alive()
        self.dispatcher.check_room(num_generations)

    def generate(self, requests: Sequence[Request], sink: OutputSink) -> RequestStream:
        """See `AsyncEngine.generate`."""
        self._check_alive()
        return self.dispatcher.open(requests, sink)

    def abort(self, request_id: str, branch_index: int | None = None) -> None:
        """See `AsyncEngine.abort`."""
        self.dispatcher.abort(request_id, branch_index)

    async def tell(self, message: Control) -> None:
        """See `AsyncEngine.tell`."""
        self._check_alive()
        self.dispatcher.tell(message)
        links = [replica.supervisor.link for replica in self.replicas.values()]
        await asyncio.gather(
            *[link.ask(Ping()) for link in links if link is not None], return_exceptions=True
        )

    async def stats(self, timeout_s: float = 10.0) -> dict[str, Any]:
        """Of the replicas that answer, by field name: numbers are summed, the rest is one's."""
        found = await asyncio.gather(
            *[replica.stats(timeout_s) for replica in self.replicas.values()],
            return_exceptions=True,
        )
        answers = [each for each in found if not isinstance(each, BaseException)]
        if not answers:
            raise EngineDeadError("no replica of the fleet answers; ask once more in a moment")
        return {name: _summed([each[name] for each in answers]) for name in answers[0]}

    async def ask(self, question: Question, timeout_s: float = 10.0) -> dict[str, Any]:
        """The answer of a replica that is ready; of GetStats, that of all."""
        if isinstance(question, GetStats):
            return await self.stats(timeout_s)
        return await self._any_ready().ask(question, timeout_s)

    async def find_adapter(self, name: str, path: str, *, anew: bool = False) -> AdapterRef:
        """See `Supervisor.find_adapter`; one replica looks for all, which see the same files."""
        return await self._any_ready().find_adapter(name, path, anew=anew)

    async def wait_failed(self) -> QuireError:
        """Until no replica will be started any more; returns why."""
        return await asyncio.shield(self._failed)

    async def shutdown(
        self, *, drain: bool = True, timeout_s: float = 30.0, reason: QuireError | None = None
    ) -> None:
        """End all replicas: after their open requests (drain), or at once; by force after
        timeout_s. reason: what open streams raise then. May be called twice."""
        self._is_closing = True
        try:
            await asyncio.gather(
                *[
                    replica.shutdown(drain=drain, timeout_s=timeout_s, reason=reason)
                    for replica in self.replicas.values()
                ]
            )
        finally:
            self.dispatcher.on_end(
                reason or EngineDeadError("the fleet was shut down before the request had finished")
            )

    # ---- one replica on purpose -------------------------------------------------------------

    async def drain(self, name: str, timeout_s: float) -> None:
        """Give a replica no new requests, and wait until it has none: those that are open after
        timeout_s go on in other replicas. Raises ConfigurationError for a name that is not there.
        """
        self._replica(name)
        self.dispatcher.set_accepting(name, False)
        loop = asyncio.get_running_loop()
        until_s = loop.time() + timeout_s
        while self.dispatcher.num_open_in(name) and loop.time() < until_s:
            await asyncio.sleep(DRAIN_POLL_S)
        self.dispatcher.move_all(name)

    async def remove(self, name: str, timeout_s: float = 0.0) -> None:
        """Drain a replica and end it. Its streams notice a pause. Raises ConfigurationError for the
        last one, and for a name that is not there."""
        ready = [each for each in self.replicas.values() if each.state is EngineState.READY]
        if ready == [self._replica(name)]:
            raise ConfigurationError(f"replica {name!r} is the only one that takes requests")
        await self.drain(name, timeout_s)
        replica = self.replicas.pop(name)
        self._ending.add(name)
        try:
            await replica.shutdown(drain=False, timeout_s=0.0, reason=None)
        finally:
            self._ending.discard(name)

    async def restart(self, name: str, timeout_s: float = 0.0) -> None:
        """Drain a replica and start its process anew; returns when it is ready again. Raises
        ConfigurationError for a name that is not there, EngineDeadError if it does not come back.
        """
        replica = self._replica(name)
        await self.drain(name, timeout_s)
        await replica.supervisor.renew()

    # ---- for the replicas -------------------------------------------------------------------

    def on_ready(self, replica: Replica, link: EngineLink) -> None:
        """See `ReplicaOwner`."""
        if self._limits is None:
            self._limits, self._facts = replica.limits, replica.facts
        replica.refusal = check_same(
            replica.name, (self._limits, self._facts), (replica.limits, replica.facts)
        )
        if replica.refusal is not None:
            logger.error("%s", replica.refusal)
            self._later(replica.shutdown(drain=False, timeout_s=0.0, reason=None))
            return
        self.dispatcher.on_ready(replica.name, link, replica.limits, replica.facts)

    def on_message(
        self, replica: Replica, link: EngineLink, message: Outputs | RequestFailed
    ) -> None:
        """See `ReplicaOwner`."""
        self.dispatcher.on_message(replica.name, link, message)

    def on_death(self, replica: Replica, death: Death) -> frozenset[Death]:
        """See `ReplicaOwner`."""
        return self.dispatcher.on_death(replica.name, death)

    def on_end(self, replica: Replica, error: QuireError) -> None:
        """See `ReplicaOwner`. The last one takes the fleet with it."""
        self.dispatcher.on_gone(replica.name)
        if self._is_closing or replica.name in self._ending:
            return
        others = [each for each in self.replicas.values() if each is not replica]
        if any(each.state is not EngineState.FAILED for each in others):
            return
        if not self._failed.done() and self._limits is not None:
            self._failed.set_result(replica.supervisor.failure or error)
            self.dispatcher.on_end(
                EngineDeadError("all engines have failed for good; the server's log says how")
            )

    # ---- within -----------------------------------------------------------------------------

    def _replica(self, name: str) -> Replica:
        if name not in self.replicas:
            names = ", ".join(self.replicas)
            raise ConfigurationError(f"there is no replica {name!r:.80}; there are {names}")
        return self.replicas[name]

    def _any_ready(self) -> Replica:
        for replica in self.replicas.values():
            if replica.state is EngineState.READY:
                return replica
        raise EngineDeadError("no replica of the fleet is ready; ask once more in a moment")

    def _check_alive(self) -> None:
        if not self.is_alive:
            raise EngineDeadError("the fleet is not running, so it takes no requests")

    def _later(self, work: Awaitable[None]) -> None:
        async def run() -> None:
            await work

        task = asyncio.get_running_loop().create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _summed(values: Sequence[Any]) -> Any:
    """Of one field of several engines: numbers are summed, of others the first stands."""
    first = values[0]
    if isinstance(first, bool) or not isinstance(first, (int, float)):
        return first
    return sum(value for value in values if value is not None)
