"""Keeps an engine process running: starts it, checks its heartbeat, restarts it.

It gives up when restarts don't help. The supervisor does not track requests: its listener
(`fleet_engine`) passes deaths on to `fleet_dispatcher`, which decides which requests continue.
The links pass outputs to the listener directly.
"""

import asyncio
import contextlib
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Protocol

from quire.core.sampling_params import ModelLimits
from quire.engine_client.messages import (
    OnProgress,
    Prepare,
    Progress,
    Question,
    Ready,
    Shutdown,
    Start,
)
from quire.engine_client.process.activity import Activity, Doing
from quire.engine_client.process.link import EngineLink, OpenLink, OutputListener
from quire.engine_client.recovery import (
    Cause,
    Death,
    EngineState,
    RecoveryConfig,
    RestartBudget,
)
from quire.errors import EngineDeadError, QuireError
from quire.ipc import encode
from quire.observability.log import get_logger

LEAST_BUILD_LIMIT_S = 60.0
BUILD_LIMIT_RATIO = 10.0
"""A restarted process must be ready within LEAST_BUILD_LIMIT_S, or within BUILD_LIMIT_RATIO times
the start-up time of the first process if that is more."""

RECOVERY_POLL_S = 0.05
"""Interval of checking whether a restarted process is ready."""

RENEW_LIMIT_S = 5.0
"""Seconds that `renew` gives a process to end by itself."""

logger = get_logger(__name__)


class EngineListener(OutputListener, Protocol):
    """Receives the events of processes: ready, dead, given up. Implemented by `FleetEngine`."""

    def on_ready(self, link: EngineLink) -> None:
        """A new process, which has no requests yet, accepts requests over `link`."""
        ...

    def on_death(self, death: Death) -> frozenset[Death]:
        """The process is gone, and messages of its link are ignored from now on. If a request is
        found guilty, returns all deaths that it caused, including this death; else an empty set."""
        ...

    def on_end(self, error: QuireError) -> None:
        """No process will be started any more. Open requests end with `error`."""
        ...


class Supervisor:
    """Runs one engine process after another.

    Invariant: `_link` is the link of the present process, None while there is none. Messages of
    other links are ignored.
    """

    def __init__(
        self,
        options: Mapping[str, object],
        open_link: OpenLink,
        recovery: RecoveryConfig,
        listener: EngineListener,
        on_progress: OnProgress | None = None,
    ) -> None:
        """Starts no process yet; call `start`. `open_link` makes the link to each process."""
        self._options = dict(options)
        self._new_link = open_link
        self._recovery = recovery
        self._listener = listener
        self._on_progress = on_progress
        self._loop = asyncio.get_running_loop()
        self._link: EngineLink | None = None
        self._budget = RestartBudget(recovery)
        self._started: asyncio.Future[None] = self._loop.create_future()
        self._restarting: asyncio.Task[None] | None = None
        self._build_timer: asyncio.TimerHandle | None = None
        #: Seconds within which a restarted process must be ready.
        self.build_limit_s = LEAST_BUILD_LIMIT_S
        self._began_s = self._loop.time()
        #: Whether the present process is being ended by `renew`.
        self._is_renewing = False
        #: Time by the loop's clock at which `wake` had a ready process; minus infinity before.
        self.awake_since_s = -math.inf
        self._is_waking = False
        #: A process that waits for `wake`, without a model; None if there is none.
        self._standby: EngineLink | None = None
        #: Set in order to end the pause before the next start early.
        self._ends_pause = asyncio.Event()
        self._closed_error: QuireError = EngineDeadError(
            "the engine was shut down before the request had finished"
        )
        self.state = EngineState.STARTING
        #: Number of restarts after deaths; restarts that an operator asked for don't count.
        self.num_restarts = 0
        #: Number of restarts by `renew`.
        self.num_requested_restarts = 0
        #: The reason why the supervisor has given up restarting; None while it has not.
        self.failure: QuireError | None = None
        self.limits: ModelLimits | None = None
        self.facts: Mapping[str, Any] = {}

    @property
    def link(self) -> EngineLink | None:
        """The link to a process that takes requests; None while there is none."""
        return self._link if self.state is EngineState.READY else None

    @property
    def pid(self) -> int | None:
        return None if self._link is None else self._link.pid

    @property
    def silence_s(self) -> float:
        """Seconds since the last message of the process; 0 while there is none."""
        return 0.0 if self._link is None else self._loop.time() - self._link.last_heard_s

    async def start(self) -> None:
        """Start the first process and wait until it is ready. Raises OSError if it can't be
        started, or the error that ended it. When this raises or is cancelled, no process is
        left."""
        try:
            await self._open_link()
            await self._started
        except BaseException:
            await self.shutdown(drain=False, timeout_s=0.0, reason=None)
            raise

    async def renew(self) -> None:
        """Restart the process and wait until it takes requests. This does not count as a death. If
        a restart after a death is already under way, cut its pause short and wait for it.

        Raises EngineDeadError if there is no process to end, or if the new process is not ready in
        time (it may be ready later).
        """
        if (link := self.link) is not None:
            self._is_renewing = True
            await _end_now(link)
        elif self.state is not EngineState.RECOVERING:
            raise EngineDeadError(
                f"there is no engine process to restart: the engine is {self.state.value}"
            )
        else:
            self._ends_pause.set()
        await self._wait_ready("the requested restart")

    async def _wait_ready(self, what: str) -> None:
        """Wait until a process that is being started takes requests. Raises EngineDeadError."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.build_limit_s):
                while self.state is EngineState.RECOVERING:
                    await asyncio.sleep(RECOVERY_POLL_S)
        if self.state is not EngineState.READY:
            raise EngineDeadError(
                f"{what} failed: the engine is {self.state.value}; the server's log says why"
            )

    async def sleep(self, *, keeps_process: bool) -> None:
        """End the process until `wake`; its open requests go on then. With `keeps_process`, a new
        process loads the libraries and waits for `wake`, if one can be started. Raises
        EngineDeadError if no process takes requests."""
        if (link := self.link) is None:
            raise EngineDeadError(f"the engine is {self.state.value}, so it can't be put to sleep")
        self.state = EngineState.ASLEEP
        await _end_now(link)
        logger.info("the engine sleeps")
        if keeps_process and self.state is EngineState.ASLEEP:
            self._standby = standby = self._new_link(self, self._listener)
            try:
                await standby.open(encode(Prepare()))
            except OSError as error:  # `wake` starts one instead
                self._standby = None
                logger.warning("no process can be started that waits for the wake-up: %s", error)
                return
            if self._standby is not standby:  # `shutdown` came meanwhile
                await standby.close()

    async def wake(self) -> None:
        """Start a process again and wait until it takes requests; does nothing if one does. Raises
        EngineDeadError if it is not ready in time (it may be ready later)."""
        if self.state is EngineState.ASLEEP:
            self.state = EngineState.RECOVERING
            self._is_waking = True
            self._ends_pause.clear()
            self._restarting = self._loop.create_task(self._wake())
        await self._wait_ready("the wake-up")

    async def _wake(self) -> None:
        logger.info("the engine wakes up")
        self._link, self._standby = self._standby, None
        if self._link is None:
            await self._start_again()
            return
        self._link.send(encode(Start(self._options)))
        self._limit_build()

    async def shutdown(self, *, drain: bool, timeout_s: float, reason: QuireError | None) -> None:
        """End the process. With `drain`, it finishes its open requests first. A process that still
        runs after `timeout_s` is killed. When this returns or is cancelled, the process is gone.
        May be called twice."""
        self.state = EngineState.CLOSING
        self._closed_error = reason or self._closed_error
        link = self._link
        try:
            if self._restarting is not None:
                self._restarting.cancel()
                await asyncio.gather(self._restarting, return_exceptions=True)
            if link is not None and link.is_open:
                link.send(encode(Shutdown(drain)))
                with contextlib.suppress(TimeoutError):  # then `finally` kills it
                    async with asyncio.timeout(timeout_s):
                        await link.wait_dead()
        finally:
            if self._build_timer is not None:
                self._build_timer.cancel()
            if link is not None:
                await link.close()
            standby, self._standby = self._standby, None
            if standby is not None:
                await standby.close()
            if not self._started.done():  # so that `start` stops waiting
                self._started.set_exception(self._closed_error)
                # Marks the error as seen, since `start` may not be waiting.
                self._started.exception()
            self._listener.on_end(self._closed_error)

    # ---- for the link -----------------------------------------------------------------------

    def on_progress(self, link: EngineLink, progress: Progress) -> None:
        """See `LinkOwner`. Only the first process's progress is reported."""
        is_first = link is self._link and self.state is EngineState.STARTING
        if is_first and self._on_progress is not None:
            self._on_progress(progress.text, progress.done, progress.total)

    def on_ready(self, link: EngineLink, ready: Ready) -> None:
        """See `LinkOwner`."""
        if link is not self._link or self.state is EngineState.CLOSING:
            return
        if self._build_timer is not None:
            self._build_timer.cancel()
        # The first process sets the limits; later processes must have equal limits.
        if self.limits is None:
            # Keep the length that was chosen by the free memory, even if another amount is free
            # later.
            self._options["max_model_len"] = ready.limits.max_model_len
            took_s = self._loop.time() - self._began_s
            self.build_limit_s = max(LEAST_BUILD_LIMIT_S, BUILD_LIMIT_RATIO * took_s)
        elif ready.limits != self.limits:
            self._fail(
                EngineDeadError(
                    "the engine was started again, but has other limits than before: the files of"
                    " the model have changed; restart the server"
                )
            )
            link.kill("it has other limits than before")
            return
        self.limits, self.facts = ready.limits, ready.facts
        self.state = EngineState.READY
        if self._is_waking:
            self._is_waking, self.awake_since_s = False, self._loop.time()
        if not self._started.done():
            self._started.set_result(None)
        link.watch(self._recovery.heartbeat_timeout_s)
        self._listener.on_ready(link)

    def on_death(self, link: EngineLink, error: QuireError, death: Death) -> None:
        """See `LinkOwner`."""
        if link is self._link:
            self._link = None
            self._handle_death(error, death)
        elif link is self._standby:
            self._standby = None
            logger.warning("the process that waited for the wake-up has ended: %s", error)

    # ---- restarting -------------------------------------------------------------------------

    def _handle_death(self, error: QuireError, death: Death) -> None:
        """Handle the end of a process, or a failed start: start another one, or end everything."""
        if self._build_timer is not None:
            self._build_timer.cancel()
        match self.state:
            case EngineState.STARTING:
                if not self._started.done():
                    self._started.set_exception(error)
                    # Marks the error as seen, since `start` may have been cancelled.
                    self._started.exception()
            case EngineState.CLOSING:
                self._listener.on_end(self._closed_error)
            case EngineState.ASLEEP:
                self._listener.on_death(replace(death, is_requested=True))
            # Last, a process that was ready or restarting has died.
            case EngineState.READY | EngineState.RECOVERING:
                self.state = EngineState.RECOVERING
                # Cleared here, since `renew` may be called before `_restart` runs.
                self._ends_pause.clear()
                if self._is_renewing:
                    self._is_renewing = False
                    if death.cause is Cause.OUTSIDE:  # told to end, or killed by `renew`
                        death = replace(death, is_requested=True)
                    else:
                        logger.error("%s", error)
                    self._listener.on_death(death)
                    self._restarting = self._loop.create_task(self._restart(0.0, is_requested=True))
                    return
                logger.error("%s", error)
                explained = self._listener.on_death(death)
                delay_s = self._budget.note_death(self._loop.time(), death, explained)
                if delay_s is None:
                    config = self._recovery
                    self._fail(
                        EngineDeadError(
                            f"the engine process has died more than {config.max_restarts} times"
                            f" within {config.window_s:g} s and is not started again; the last"
                            f" time: {error}"
                        )
                    )
                else:
                    if delay_s > 1.0:
                        logger.warning("the engine is started again in %g s", delay_s)
                    self._restarting = self._loop.create_task(self._restart(delay_s))

    async def _restart(self, delay_s: float, *, is_requested: bool = False) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(delay_s):
                await self._ends_pause.wait()
        if is_requested:
            self.num_requested_restarts += 1
            logger.info("the engine is restarted as requested")
        else:
            self.num_restarts += 1
            logger.warning("the engine is started again; restarts so far: %d", self.num_restarts)
        await self._start_again()

    async def _start_again(self) -> None:
        """Start a process. A process that can't be started counts as a death."""
        try:
            await self._open_link()
        # Starting a process may fail in any way; each failure counts as a death.
        except Exception as error:
            if not isinstance(error, OSError):
                logger.exception("the engine process can't be started")
            self._link = None
            self._handle_death(
                EngineDeadError(f"the engine process can't be started: {error}"),
                Death(Activity(Doing.LOADING), status=None),
            )
            return
        self._limit_build()

    def _limit_build(self) -> None:
        """Kill the present process if it is not ready in time."""
        if self._link is not None:  # else it has died already
            why = f"it was not ready after {self.build_limit_s:g} s, so it was killed"
            self._build_timer = self._loop.call_later(self.build_limit_s, self._link.kill, why)

    async def _open_link(self) -> None:
        self._link = self._new_link(self, self._listener)
        await self._link.open(encode(Start(self._options)))

    def _fail(self, error: QuireError) -> None:
        logger.error("%s", error)
        self.state = EngineState.FAILED
        self.failure = error
        # The message for clients leaves out details that only the operator should see.
        self._listener.on_end(
            EngineDeadError("the engine has failed for good; the server's log says how")
        )


async def _end_now(link: EngineLink) -> None:
    """End a process without waiting for its requests."""
    link.send(encode(Shutdown(False)))
    try:
        async with asyncio.timeout(RENEW_LIMIT_S):
            await link.wait_dead()
    except TimeoutError:
        link.kill("it did not end in time for a requested restart or sleep")
        await link.wait_dead()


async def ask_link(link: EngineLink | None, question: Question, timeout_s: float) -> dict[str, Any]:
    """The fields of the engine's reply to a question, answered between two steps. Raises
    EngineDeadError without a process (`link` is None), or if no reply comes within `timeout_s`
    because a step does not end."""
    if link is None:
        raise EngineDeadError("the engine is being started again; ask once more in a moment")
    try:
        async with asyncio.timeout(timeout_s):
            return await link.ask(question)
    except TimeoutError as error:
        raise EngineDeadError(
            f"the engine has not answered for {timeout_s:g} s: no step has ended meanwhile"
        ) from error
