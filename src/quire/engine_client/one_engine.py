"""Starts a fleet of one engine on this machine: the engine of `quire serve` and `AsyncLLM`.

The engine restarts its process when the process dies, and resumes the open requests, as every
engine of a fleet does. Its name is empty, which tells the API server to report no replicas.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from quire.core.request import Request
from quire.core.sampling_params import ModelLimits
from quire.engine_client.engine_slot import ONLY_ENGINE, EngineSlot
from quire.engine_client.fleet import EngineFleet
from quire.engine_client.messages import OnProgress
from quire.engine_client.process.early_process import ENGINE_COMMAND, EarlyProcess
from quire.engine_client.process.link import EngineLink, LinkOwner, OutputListener
from quire.engine_client.process.process_link import ProcessLink
from quire.engine_client.recovery import RecoveryConfig
from quire.errors import ConfigurationError

DEFAULT_MAX_QUEUED_REQUESTS = 1024
DEFAULT_RECOVERY = RecoveryConfig()


class OnlySlot:
    """`EngineSlots` with one slot, whose engine may use the whole machine."""

    def __init__(self, command: Sequence[str], early: EarlyProcess | None = None) -> None:
        """`command` is the program to run; see `ProcessLink`. `early` is the engine's first
        process; None if it has not started."""
        self._slot = EngineSlot(ONLY_ENGINE, self._open_link)
        self._command = command
        self._early = early

    def _open_link(self, owner: LinkOwner, listener: OutputListener) -> EngineLink:
        early, self._early = self._early, None
        return ProcessLink(owner, listener, self._command, early)

    def initial(self) -> list[EngineSlot]:
        """See `EngineSlots`."""
        return [self._slot]

    def allocate(self, name: str) -> EngineSlot:
        """See `EngineSlots`. Always raises ConfigurationError."""
        raise ConfigurationError("there is one engine and no room for another")

    def release(self, name: str) -> None:
        """See `EngineSlots`. Does nothing, since the slot is free once the process has ended."""

    def close(self) -> None:
        """See `EngineSlots`. Does nothing, since the slot holds no resources."""


class OnlyPlacement:
    """A `Placement` with one replica, whose load is not tracked."""

    def __init__(self) -> None:
        self._name: str | None = None  # None while no replica takes requests

    def add(self, replica: str, limits: ModelLimits, facts: Mapping[str, Any]) -> None:
        """See `Placement`."""
        self._name = replica

    def remove(self, replica: str) -> None:
        """See `Placement`."""
        self._name = None

    def set_accepting(self, replica: str, accepts: bool) -> None:
        """See `Placement`."""
        self._name = replica if accepts else None

    def place(self, request: Request) -> str | None:
        """See `Placement`."""
        return self._name

    def forget_prefixes(self, replica: str) -> None:
        """See `Placement`. Does nothing, since prefixes are not tracked."""

    def set_slowness(self, replica: str, measured: float) -> None:
        """See `Placement`. Does nothing, since there is no choice."""

    def load_of(self, replica: str) -> Mapping[str, float]:
        """See `Placement`."""
        return {}

    def on_first_token(self, request_id: str) -> None:
        """See `Placement`. Does nothing, since load is not tracked."""

    def on_end(self, request_id: str) -> None:
        """See `Placement`. Does nothing, since load is not tracked."""


async def start_one_engine(
    options: Mapping[str, object],
    *,
    max_queued_requests: int = DEFAULT_MAX_QUEUED_REQUESTS,
    command: Sequence[str] = ENGINE_COMMAND,
    early: EarlyProcess | None = None,
    recovery: RecoveryConfig = DEFAULT_RECOVERY,
    on_progress: OnProgress | None = None,
) -> EngineFleet:
    """Start an engine process and wait until it is ready for requests.

    options: those of `assembly.build.build_engine`. Values are numbers, strings, booleans, None,
        and lists and dicts of them.
    max_queued_requests: the most requests that may be open, whether they wait or run. A request for
        n samples counts n times.
    command, early: see `OnlySlot`.
    on_progress: called with the progress of the first process until it is ready.

    Raises the errors of `build_engine` (ConfigurationError and its subclasses), EngineDeadError if
    the process ended without a message, and MessageError for options that can't be sent. When this
    raises or is cancelled, the process is gone.
    """
    fleet = EngineFleet(
        options,
        OnlyPlacement(),
        OnlySlot(command, early),
        max_queued_requests=max_queued_requests,
        recovery=recovery,
        on_progress=on_progress,
    )
    await fleet.start()
    return fleet
