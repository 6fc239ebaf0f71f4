"""Puts an idle engine to sleep, and wakes it up for the next request.

Started by `launch` if the server has `idle_unload_s`. Ollama's `keep_alive` changes the time for
which the model stays in memory, as in Ollama.
"""

import asyncio
import math
import re
from datetime import timedelta

from quire.engine_client.fleet import EngineFleet
from quire.engine_client.loop_task import LoopTask
from quire.engine_client.recovery import EngineState
from quire.errors import InvalidRequestError, QuireError
from quire.observability.log import get_logger

POLL_S = 0.2

MAX_CHARACTERS = 64
"""Maximum length of a duration."""

_PARTS = re.compile(r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(ms|us|µs|ns|h|m|s)")
_DURATION = re.compile(rf"-?(?:{_PARTS.pattern})+")
_UNITS = {
    "ns": timedelta(microseconds=1e-3),
    "us": timedelta(microseconds=1),
    "µs": timedelta(microseconds=1),
    "ms": timedelta(milliseconds=1),
    "s": timedelta(seconds=1),
    "m": timedelta(minutes=1),
    "h": timedelta(hours=1),
}

logger = get_logger(__name__)


def keep_alive_s(value: float | str) -> float:
    """The seconds of Ollama's `keep_alive`: a number of seconds, or a duration such as "1h30m".
    Infinity for a negative one. Raises InvalidRequestError."""
    if isinstance(value, str):
        text = value.strip()
        if len(text) <= MAX_CHARACTERS and _DURATION.fullmatch(text):
            seconds = sum(
                float(number) * _UNITS[unit].total_seconds()
                for number, unit in _PARTS.findall(text)
            )
            return math.inf if text.startswith("-") else seconds
        try:
            value = float(text)
        except ValueError as error:
            raise InvalidRequestError(
                f"keep_alive is {value!r:.80}, but must be a number of seconds, or a duration such"
                " as 5m",
                "keep_alive",
            ) from error
    if math.isnan(value):
        raise InvalidRequestError("keep_alive is not a number", "keep_alive")
    return math.inf if value < 0 else value


class IdleUnload(LoopTask):
    """The task that watches for idle time.

    Invariant: while it runs, requests wake a sleeping engine.
    """

    def __init__(self, fleet: EngineFleet, idle_s: float) -> None:
        """`idle_s` is the time without open requests after which the engine sleeps."""
        super().__init__()
        self._fleet = fleet
        self._default_s = idle_s
        #: Seconds that the model stays after the latest request; infinity means for good.
        self._keep_s = idle_s
        self._busy_s = asyncio.get_running_loop().time()
        self._waking: asyncio.Task[None] | None = None

    @property
    def seconds_left(self) -> float:
        """Seconds until the engine sleeps if no request comes; may be infinite."""
        return max(0.0, self._last_use_s + self._keep_s - asyncio.get_running_loop().time())

    def keep(self, seconds: float | None) -> None:
        """Set how long the model stays after the latest request; None means the server's time."""
        self._keep_s = self._default_s if seconds is None else seconds

    async def load(self) -> None:
        """Wake the engine and wait until it takes requests. Raises EngineDeadError."""
        self._fleet.sleeping.note_request()
        await self._fleet.sleeping.wake()

    async def stop(self) -> None:
        """See `LoopTask`. From now on, requests of a sleeping engine wait."""
        self._fleet.sleeping.on_wanted = None
        if self._waking is not None:
            self._waking.cancel()
            await asyncio.gather(self._waking, return_exceptions=True)
        await super().stop()

    async def _run(self) -> None:
        self._listen()
        while True:
            await asyncio.sleep(POLL_S)
            if self._is_busy:
                self._busy_s = asyncio.get_running_loop().time()
            elif self._fleet.state is EngineState.READY and not self.seconds_left:
                await self._unload()

    def _listen(self) -> None:
        """Wake the engine when a request comes while it sleeps."""
        self._fleet.sleeping.on_wanted = self._on_wanted

    @property
    def _is_busy(self) -> bool:
        """Whether a call uses the model."""
        return self._fleet.num_open > 0

    @property
    def _last_use_s(self) -> float:
        return max(self._busy_s, self._fleet.sleeping.last_request_s)

    async def _unload(self) -> None:
        try:
            # A request that has just come goes on after the wake-up.
            await self._fleet.sleeping.sleep("keep", keeps_process=False)
        except QuireError as error:
            logger.warning("the idle engine could not be put to sleep: %s", error)
        if self._fleet.num_open:
            self._on_wanted()

    def _on_wanted(self) -> None:
        if self._waking is None or self._waking.done():
            self._waking = asyncio.get_running_loop().create_task(self._wake())

    async def _wake(self) -> None:
        try:
            await self._fleet.sleeping.wake()
        except QuireError as error:
            logger.error("%s", error)


def idle_unload(fleet: EngineFleet, idle_s: float | None) -> IdleUnload | None:
    """The task for a server's option; None if the model stays in memory."""
    return None if idle_s is None else IdleUnload(fleet, idle_s)
