"""A fleet: one or several engines of one model, which take requests and stream their outputs.

    FleetEngines      the engines, each behind a supervisor that restarts it
    FleetDispatcher   which engine has which request, and where requests go when an engine dies
    Placement         chooses the engine of each request

When an engine's process dies, or hangs in a step, it is restarted. Every open request continues
from the tokens received so far, so its sink notices only a pause. A request that repeatedly kills
its engine ends with an error instead. However this process ends, no engine process stays behind.

Uses neither HTTP, nor text, nor torch. Called by `server` and `async_llm`.
"""

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from quire.core.adapters import AdapterRef
from quire.core.request import Request
from quire.core.sampling_params import ModelLimits
from quire.engine_client.engine_slot import ONLY_ENGINE, EngineSlots
from quire.engine_client.fleet_dispatcher import FleetDispatcher, Placement
from quire.engine_client.fleet_engine import FleetEngine
from quire.engine_client.fleet_engines import FleetEngines, any_ready
from quire.engine_client.fleet_sleep import FleetSleep
from quire.engine_client.loop_task import LoopTask
from quire.engine_client.messages import Control, GetStats, OnProgress, Ping, Question
from quire.engine_client.process.adapter_search import AdapterSearch
from quire.engine_client.process.link import EngineLink
from quire.engine_client.process.supervisor import RECOVERY_POLL_S
from quire.engine_client.recovery import EngineState, RecoveryConfig
from quire.engine_client.request_book import OutputSink, RequestStream
from quire.errors import EngineDeadError, QuireError


class SizeBounds(Protocol):
    """Bounds of the number of engines."""

    def check(self, num_engines: int) -> None:
        """Raises ConfigurationError if `num_engines` is outside the bounds."""
        ...


class EngineFleet:
    """Engines of one model, independent of the processes that they currently run in. Belongs to one
    event loop."""

    #: The limits that every engine was built for; set by `start`.
    limits: ModelLimits

    def __init__(
        self,
        options: Mapping[str, object],
        placement: Placement,
        slots: EngineSlots,
        *,
        max_queued_requests: int,
        recovery: RecoveryConfig,
        on_progress: OnProgress | None = None,
        scaling: SizeBounds | None = None,
    ) -> None:
        """Create a fleet without engines; `start` starts them. Each engine gets `options`."""
        loop = asyncio.get_running_loop()
        self.dispatcher = FleetDispatcher(max_queued_requests, loop.time, placement)
        #: The interface for starting, restarting and removing engines.
        self.engines = FleetEngines(options, self.dispatcher, slots, recovery, on_progress)
        #: Bounds of the number of engines; None without autoscaling.
        self.scaling = scaling
        #: Tasks that run from the end of `start` to the shutdown.
        self.watches: Sequence[LoopTask] = ()
        #: Puts the engines to sleep and wakes them up.
        self.sleeping = FleetSleep(self.engines, self.dispatcher)
        self._adapters = AdapterSearch(partial(_next_link, self))

    async def start(self) -> None:
        """Start all engines, see `FleetEngines.start`. If it raises or is cancelled, no process is
        left."""
        try:
            self.limits = await self.engines.start()
            for watch in self.watches:
                watch.start()
        except BaseException:
            await self.shutdown(drain=False, timeout_s=0.0)
            raise

    # ---- state ------------------------------------------------------------------------------

    @property
    def engines_by_name(self) -> Mapping[str, FleetEngine]:
        """The engines by name. The engine of a server without replicas has the empty name."""
        return self.engines.all

    @property
    def state(self) -> EngineState:
        """The state of the fleet: READY while at least one engine is ready."""
        if self.engines.is_closing:
            return EngineState.CLOSING
        if self.engines.failed.done():
            return EngineState.FAILED
        if self.engines.ready:
            return EngineState.READY
        if self.sleeping.is_on:
            return EngineState.ASLEEP
        return EngineState.STARTING if self.engines.limits is None else EngineState.RECOVERING

    @property
    def facts(self) -> Mapping[str, Any]:
        """The facts that the first engine reported, but with `max_num_seqs` summed over the ready
        engines, and the number of replicas if there are any."""
        if (only := self.engines.all.get(ONLY_ENGINE)) is not None:
            return only.facts
        facts = self.engines.facts
        rows = sum(int(each.facts.get("max_num_seqs", 0)) for each in self.engines.ready)
        return {
            **facts,
            "max_num_seqs": rows or facts.get("max_num_seqs"),
            "num_replicas": len(self.engines.all),
        }

    @property
    def num_restarts(self) -> int:
        """Number of restarts after a death, summed over all present engines."""
        return sum(engine.num_restarts for engine in self.engines.all.values())

    @property
    def is_alive(self) -> bool:
        """Whether the fleet takes requests, now or as soon as an engine has recovered or woken
        up."""
        return self.state in (EngineState.READY, EngineState.RECOVERING, EngineState.ASLEEP)

    @property
    def num_open(self) -> int:
        """Number of unfinished branches of open requests; a request with n samples has n."""
        return self.dispatcher.num_open

    # ---- requests and control ---------------------------------------------------------------

    def check_room(self, num_generations: int) -> None:
        """Raises the error that `generate` would now raise for `num_generations`, the number of
        prompts times n: EngineDeadError, OverloadedError, or InvalidRequestError if they would
        never fit."""
        self._check_alive()
        self.dispatcher.check_room(num_generations)

    def generate(self, requests: Sequence[Request], sink: OutputSink) -> RequestStream:
        """Accept requests. Their outputs are pushed into `sink` after this returns. Closing the
        stream aborts its requests that are still running.

        Raises OverloadedError if they exceed the limit of open requests, EngineDeadError, and
        InvalidRequestError for an id that is in use. The stream ends with an error if an engine
        refuses a request. It ends with RequestKillsEngineError if one of its requests repeatedly
        kills its engine, and with EngineDeadError if the engines fail for good or are shut down.
        """
        self._check_alive()
        stream = self.dispatcher.open(requests, sink)
        self.sleeping.note_request()
        return stream

    async def send_control(self, message: Control) -> None:
        """Pause or continue the steps of all engines, or clear their cached prefixes.

        When this returns, each engine has read the message, or has no process. A restarted process
        starts paused if the last SetPaused said so. Raises EngineDeadError.
        """
        self._check_alive()
        self.dispatcher.send_control(message)
        # An engine answers this ping after it has handled the message sent before.
        links = [engine.supervisor.link for engine in self.engines.all.values()]
        await asyncio.gather(
            *[link.ask(Ping()) for link in links if link is not None], return_exceptions=True
        )

    async def stats(self, timeout_s: float = 10.0) -> dict[str, Any]:
        """EngineStats by field name, combined over the engines that answer: counts are summed,
        shares of time are averaged. Histograms are left out, since each engine has its own, see
        `engines_by_name`. If none answers, raises the error of the first engine."""
        if (only := self.engines.all.get(ONLY_ENGINE)) is not None:
            return await only.stats(timeout_s)
        found = await asyncio.gather(
            *[engine.stats(timeout_s) for engine in self.engines.all.values()],
            return_exceptions=True,
        )
        answers = [each for each in found if not isinstance(each, BaseException)]
        if not answers:
            errors = [each for each in found if isinstance(each, BaseException)]
            raise errors[0] if errors else EngineDeadError("there is no engine to ask")
        total: dict[str, Any] = _summed([{**each, "times": {}} for each in answers])
        return total

    async def ask(self, question: Question, timeout_s: float = 10.0) -> dict[str, Any]:
        """Ask one ready engine. For GetStats, ask all engines and combine their answers."""
        self._check_alive()
        if isinstance(question, GetStats):
            return await self.stats(timeout_s)
        return await any_ready(self.engines).ask(question, timeout_s)

    async def find_adapter(self, name: str, path: str, *, anew: bool = False) -> AdapterRef:
        """Find an adapter, see `AdapterSearch.find`. Only one engine searches, since the
        engines share the adapter's files. If that engine dies, another engine is asked, because the
        dead engine's machine may not come back. Waits while no engine is ready."""
        self._check_alive()
        self.sleeping.note_request()
        return await self._adapters.find(name, path, anew=anew)

    async def wait_failed(self) -> QuireError:
        """Wait until the fleet has failed for good. Returns the reason."""
        return await asyncio.shield(self.engines.failed)

    async def shutdown(
        self, *, drain: bool = True, timeout_s: float = 30.0, reason: QuireError | None = None
    ) -> None:
        """End all engines. With `drain`, they finish their open requests first. Engines that still
        run after `timeout_s` are killed. Streams that are still open raise `reason`. May be called
        twice."""
        for watch in self.watches:
            await watch.stop()
        try:
            await self.engines.shutdown(drain=drain, timeout_s=timeout_s, reason=reason)
        finally:
            ended = EngineDeadError("the engine was shut down before the request had finished")
            self.dispatcher.on_end(reason or ended)
            await asyncio.to_thread(self.engines.slots.close)

    def _check_alive(self) -> None:
        if not self.is_alive:
            raise EngineDeadError("the engine is not running, so it takes no requests")


async def _next_link(fleet: EngineFleet) -> EngineLink:
    """A link to a ready engine, waiting for one if necessary. Raises EngineDeadError if all engines
    have failed."""
    while fleet.state in (EngineState.RECOVERING, EngineState.ASLEEP):
        await asyncio.sleep(RECOVERY_POLL_S)
    link = any_ready(fleet.engines).supervisor.link
    assert link is not None, "it is ready"
    return link


def _summed(values: Sequence[Any]) -> Any:
    """Combine one field of several engines. Numbers are summed. Mappings are combined by key, where
    a float whose name ends in `_share` is averaged. Other values are taken from the first engine.
    """
    first = values[0]
    if isinstance(first, Mapping):
        found: dict[str, Any] = {}
        for name in dict.fromkeys(name for value in values for name in value):
            of_all = [value[name] for value in values if name in value]
            total = _summed(of_all)
            is_share = name.endswith("_share") and isinstance(total, float)
            found[name] = total / len(of_all) if is_share else total
        return found
    if isinstance(first, bool) or not isinstance(first, (int, float)):
        return first
    return sum(value for value in values if value is not None)
