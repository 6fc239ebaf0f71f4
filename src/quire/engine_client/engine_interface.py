"""The interface that the server uses for one engine or a fleet."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from quire.core.adapters import AdapterRef
from quire.core.request import Request
from quire.core.sampling_params import ModelLimits
from quire.engine_client.messages import Control, Question
from quire.engine_client.recovery import EngineState
from quire.engine_client.request_book import OutputSink, RequestStream
from quire.errors import QuireError


class EngineHandle(Protocol):
    """State and statistics of one engine process. See `AsyncEngine`."""

    @property
    def state(self) -> EngineState: ...

    @property
    def facts(self) -> Mapping[str, Any]: ...

    @property
    def num_restarts(self) -> int: ...

    @property
    def pid(self) -> int | None: ...

    @property
    def last_step_age_s(self) -> float: ...

    async def stats(self, timeout_s: float = 10.0) -> dict[str, Any]: ...

    async def ask(self, question: Question, timeout_s: float = 10.0) -> dict[str, Any]: ...


class EngineClient(EngineHandle, Protocol):
    """The interface of an engine or a fleet that takes requests. See `AsyncEngine`."""

    @property
    def limits(self) -> ModelLimits: ...

    @property
    def failure(self) -> QuireError | None: ...

    @property
    def is_alive(self) -> bool: ...

    @property
    def num_open(self) -> int: ...

    @property
    def engines_by_name(self) -> Mapping[str, EngineHandle]:
        """The engines by name. A single engine has the empty name."""
        ...

    def check_room(self, num_generations: int) -> None: ...

    def generate(self, requests: Sequence[Request], sink: OutputSink) -> RequestStream: ...

    async def send_control(self, message: Control) -> None: ...

    async def find_adapter(self, name: str, path: str, *, anew: bool = False) -> AdapterRef: ...

    async def wait_failed(self) -> QuireError: ...

    async def shutdown(
        self, *, drain: bool = True, timeout_s: float = 30.0, reason: QuireError | None = None
    ) -> None: ...
