"""One model of a server: its names, its place in memory, and its waiting calls.

`model_room` decides when it is loaded and unloaded, `served_models` finds it by name. Imports no
torch.
"""

import asyncio
import math
import sys
import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

from quire.engine_client.fleet import EngineFleet
from quire.engine_client.fleet_sleep import SleepMode
from quire.engine_client.recovery import EngineState
from quire.errors import QuireError
from quire.server.service import Service

FIRST_BACKOFF_S, MAX_BACKOFF_S = 5.0, 300.0
"""Seconds for which a model that could not be loaded is not tried again: after the first failure,
and at most. Each failure doubles them."""


class ModelLoadError(QuireError):
    """The model could not be loaded. The server's other models are not affected."""

    http_status = 503
    code = "model_load_failed"
    param = "model"

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s: float = retry_after_s


class ModelNotLoadedError(QuireError):
    """A question about a model that is not in memory."""

    http_status = 503
    code = "model_not_loaded"
    param = "model"


class NoRoomError(QuireError):
    """There was no memory for the model, since other models were in use."""

    http_status = 503
    code = "no_room_for_model"
    param = "model"
    retry_after_s = 5.0


class Phase(Enum):
    """Whether a model is in memory, or on its way into memory or out of it."""

    UNLOADED = "unloaded"
    LOADING = "loading"
    LOADED = "loaded"
    UNLOADING = "unloading"


class ModelLoader(Protocol):
    """Loads and unloads one model."""

    async def prepare(self) -> int:
        """Read the model's small files. Returns the bytes of memory that the model will take.
        Raises QuireError."""
        ...

    async def load(self, service: Service | None) -> Service:
        """Start the model's engines. `service` is from the time before the model was unloaded; None
        if it was never loaded. Raises QuireError, after which no process is left."""
        ...

    async def unload(self, service: Service, mode: SleepMode, wait_s: float) -> None:
        """Release the memory; see `FleetSleep.sleep`. Raises QuireError."""
        ...

    async def discard(self, service: Service) -> None:
        """End the engines for good."""
        ...


@dataclass(frozen=True, slots=True)
class LoadFailure:
    """The latest failure to load a model."""

    error: QuireError
    #: Time by the loop's clock before which the model is not tried again.
    retry_s: float
    #: Seconds between the failure and `retry_s`.
    backoff_s: float


@dataclass(slots=True, eq=False)
class Waiter:
    """A call that waits for a model."""

    #: Completed once the call is counted in `HostedModel.num_calls`.
    admitted: asyncio.Future[None]
    #: Time since which it waits, by the loop's clock.
    since_s: float
    #: Whether the call belongs to a batch, which takes no memory from models in use.
    is_background: bool
    #: Refuses the call when its time is over.
    timer: asyncio.TimerHandle


@dataclass(slots=True, eq=False)
class HostedModel:
    """A model of a server.

    Invariant: `reserved_bytes` is 0 exactly while the phase is UNLOADED; `service` is set while the
    phase is LOADED.
    """

    #: Names for clients; answers to calls without a name, logs and metrics use the first.
    names: tuple[str, ...]
    #: Loads the model; None for the only model of a server, which is loaded before it serves.
    loader: ModelLoader | None = None
    #: Whether the model is loaded at the start and never unloaded.
    is_pinned: bool = False
    #: Names of the adapters that the options give the model.
    given_adapters: Collection[str] = ()
    #: Everything that the model's calls share; None before the first load.
    service: Service | None = None
    phase: Phase = Phase.UNLOADED
    #: Bytes that the model takes; None until its files were read.
    needed_bytes: int | None = None
    #: Bytes of the budget that are set aside for the model.
    reserved_bytes: int = 0
    #: Open calls that use the model.
    num_calls: int = 0
    #: Time of the latest begin or end of a call, by the loop's clock.
    last_use_s: float = 0.0
    #: Time of the latest begin or end of a call that was not one of a batch; minus infinity
    #: before the first.
    last_live_s: float = -math.inf
    #: Whether new calls wait, since another model is to be loaded in this one's place.
    is_closing: bool = False
    #: Calls that wait until the model is loaded, the oldest first.
    waiting: deque[Waiter] = field(default_factory=deque)
    #: Time in seconds since 1970 since which the model is served.
    created_s: int = field(default_factory=lambda: int(time.time()))
    #: None if the latest load has succeeded.
    failure: LoadFailure | None = None
    #: Counts of loads, unloads and failures since the server started.
    num_loads: int = 0
    num_unloads: int = 0
    num_failures: int = 0
    #: Time of the end of the latest load, by the loop's clock.
    loaded_at_s: float = 0.0
    #: Seconds that the latest load took; None before the first.
    load_s: float | None = None

    @property
    def name(self) -> str:
        """The name that logs and metrics use."""
        return self.names[0]

    @property
    def all_names(self) -> list[str]:
        """The names of the model and of its adapters."""
        return [*self.names, *self.adapter_names]

    @property
    def adapter_names(self) -> Collection[str]:
        """Names of the model's adapters."""
        if self.service is None:
            return self.given_adapters
        return [each.name for each in self.service.adapters.listed()]

    @property
    def state(self) -> str:
        """The phase, or instead of it "failed" if the model could not be loaded, "recovering" while
        its engine is being restarted, and "unloaded" while the operator lets it sleep."""
        if self.phase is Phase.LOADED and self.service is not None:
            engine = self.service.engine.state
            if engine is EngineState.ASLEEP:
                return Phase.UNLOADED.value
            return Phase.LOADED.value if engine is EngineState.READY else engine.value
        if self.phase is Phase.UNLOADED and self.failure is not None:
            return "failed"
        return self.phase.value

    @property
    def takes_calls(self) -> bool:
        """Whether a call may begin now."""
        return self.phase is Phase.LOADED and not self.is_closing

    @property
    def has_live_calls(self) -> bool:
        """Whether a call waits that is not one of a batch."""
        return any(not waiter.is_background for waiter in self.waiting)

    @property
    def loaded_service(self) -> Service:
        """The service of a model in memory. Raises ModelNotLoadedError."""
        if self.service is None or self.phase is not Phase.LOADED:
            raise ModelNotLoadedError(
                f"the model {self.name!r:.80} is {self.state}; a call that names it loads it"
            )
        return self.service

    @property
    def fleet(self) -> EngineFleet | None:
        """The engines of a model in memory, else None."""
        if self.service is None or self.phase is not Phase.LOADED:
            return None
        return self.service.engine

    @property
    def max_model_len(self) -> int:
        """Maximum number of tokens of a prompt and its answer. If the model was never loaded, it is
        a bound that no text reaches."""
        return sys.maxsize if self.service is None else self.service.engine.limits.max_model_len

    def report(self) -> dict[str, Any]:
        """The model's state, memory and calls, for the operator."""
        return {
            "state": self.state,
            "memory_bytes": self.reserved_bytes,
            "num_calls": self.num_calls,
            "num_waiting": len(self.waiting),
            "error": None if self.failure is None else str(self.failure.error),
        }

    def begin_call(self, now_s: float, *, is_background: bool) -> None:
        """Count a call that uses the model."""
        self.num_calls += 1
        self.note_use(now_s, is_background=is_background)

    def note_use(self, now_s: float, *, is_background: bool) -> None:
        """Record the begin or the end of a call; `is_background` if it is one of a batch."""
        self.last_use_s = now_s
        if not is_background:
            self.last_live_s = now_s

    def check_failure(self, now_s: float) -> None:
        """Raises ModelLoadError while the model is not tried again after a failure."""
        if self.failure is not None and now_s < self.failure.retry_s:
            raise self.load_error(self.failure.retry_s - now_s)

    def load_error(self, retry_after_s: float) -> ModelLoadError:
        """The error of calls for a model that could not be loaded."""
        assert self.failure is not None, "it has failed"
        return ModelLoadError(
            f"the model {self.name!r:.80} could not be loaded: {self.failure.error}", retry_after_s
        )

    def note_failure(self, error: QuireError, now_s: float) -> None:
        """Record that the model could not be loaded, or has failed for good."""
        self.num_failures += 1
        before_s = FIRST_BACKOFF_S / 2 if self.failure is None else self.failure.backoff_s
        backoff_s = min(MAX_BACKOFF_S, 2 * before_s)
        self.failure = LoadFailure(error, now_s + backoff_s, backoff_s)

    def refuse_waiting(self, make_error: Callable[[], QuireError]) -> None:
        """End all calls that wait."""
        while self.waiting:
            waiter = self.waiting.popleft()
            waiter.timer.cancel()
            if not waiter.admitted.done():
                waiter.admitted.set_exception(make_error())
