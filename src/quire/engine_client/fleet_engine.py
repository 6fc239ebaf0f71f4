"""One engine of a fleet, on this or another machine.

Made by `fleet_engines`.
"""

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from quire.core.sampling_params import ModelLimits
from quire.engine_client.messages import GetStats, OnProgress, Outputs, Question, RequestFailed
from quire.engine_client.process.link import EngineLink, OpenLink
from quire.engine_client.process.supervisor import Supervisor, ask_link
from quire.engine_client.recovery import Death, EngineState, RecoveryConfig
from quire.errors import EngineDeadError, QuireError


class FleetEngineOwner(Protocol):
    """Handles the events of a replica; implemented by `fleet_engines.FleetEngines`."""

    def on_ready(self, replica: "FleetEngine", link: EngineLink) -> None:
        """The replica's process is ready, and has no requests yet."""
        ...

    def on_death(self, replica: "FleetEngine", death: Death) -> frozenset[Death]:
        """The replica's process is gone. If a request is found guilty, returns all deaths that it
        caused; else an empty set."""
        ...

    def on_end(self, replica: "FleetEngine", error: QuireError) -> None:
        """The replica has ended for good: no process will be started for it."""
        ...


class FleetEngine:
    """One engine and its state. It passes the events of its supervisor on to its owner."""

    def __init__(
        self,
        name: str,
        options: Mapping[str, object],
        open_link: OpenLink,
        recovery: RecoveryConfig,
        owner: FleetEngineOwner,
        on_message: Callable[[EngineLink, Outputs | RequestFailed], None],
        on_progress: OnProgress | None = None,
    ) -> None:
        """Create the replica without starting it; `start` does that. `on_message` gets the outputs
        and failures of its requests."""
        self.name = name
        #: See `OutputListener`.
        self.on_message = on_message
        self.supervisor = Supervisor(options, open_link, recovery, self, on_progress)
        self.start = self.supervisor.start
        self.shutdown = self.supervisor.shutdown
        #: Why the fleet refuses this engine; None if the fleet accepts it.
        self.refusal: QuireError | None = None
        self._owner = owner

    @property
    def state(self) -> EngineState:
        return self.supervisor.state

    @property
    def facts(self) -> Mapping[str, Any]:
        """Facts about the current process by name, for display (see `build_engine`)."""
        return self.supervisor.facts

    @property
    def limits(self) -> ModelLimits:
        """The limits that the engine was built for."""
        assert self.supervisor.limits is not None, "the replica was never ready"
        return self.supervisor.limits

    @property
    def num_restarts(self) -> int:
        """Number of restarts because the process had died."""
        return self.supervisor.num_restarts

    @property
    def num_requested_restarts(self) -> int:
        """Number of restarts that an operator asked for."""
        return self.supervisor.num_requested_restarts

    @property
    def pid(self) -> int | None:
        """The process id on the engine's machine; None while no process runs, or if it is
        unknown."""
        return self.supervisor.pid

    @property
    def last_step_age_s(self) -> float:
        """Seconds since the last message of the process; 0 while there is no process. It is sent
        several pings before a step counts as hanging, and answers them between steps."""
        return self.supervisor.silence_s

    async def stats(self, timeout_s: float = 10.0) -> dict[str, Any]:
        """The engine's EngineStats by field name. Raises as `ask` does."""
        return await self.ask(GetStats(), timeout_s)

    async def ask(self, question: Question, timeout_s: float = 10.0) -> dict[str, Any]:
        """See `supervisor.ask_link`. Raises EngineDeadError, too, if the engine has ended."""
        if self.state not in (EngineState.READY, EngineState.RECOVERING):
            label = f"replica {self.name}" if self.name else "the engine"
            raise EngineDeadError(f"{label} is {self.state.value}, so it answers no questions")
        return await ask_link(self.supervisor.link, question, timeout_s)

    # ---- for the supervisor and its link ----------------------------------------------------

    def on_ready(self, link: EngineLink) -> None:
        """See `EngineListener`."""
        self._owner.on_ready(self, link)

    def on_death(self, death: Death) -> frozenset[Death]:
        """See `EngineListener`."""
        return self._owner.on_death(self, death)

    def on_end(self, error: QuireError) -> None:
        """See `EngineListener`."""
        self._owner.on_end(self, error)
