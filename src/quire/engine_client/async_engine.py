"""The front's engine: one that outlives its processes.

`AsyncEngine.start` starts `engine_main` and waits until it stands; `generate` opens a stream of
outputs; closing a stream aborts what is left of it. When the process dies, or hangs in a step, it
is started anew, and every open request goes on from the tokens that came of it: its stream notices
nothing but the pause. Whatever way the front ends, no process stays behind.

    engine_link     one process and its socket        recovery        who goes on, who is to blame
    engine_keeper   one process after the other       request_stream  outputs on their way out
    dispatcher      open requests, and what they have got so far

Knows no HTTP, no text and no torch. Called by `server`.
"""

import asyncio
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from quire.core.request import Request
from quire.core.sampling_params import ModelLimits
from quire.engine_client.dispatcher import Dispatcher
from quire.engine_client.messages import GetStats, Question
from quire.engine_client.recovery import EngineState, RecoveryConfig
from quire.engine_client.request_stream import RequestStream
from quire.engine_client.supervisor import EngineKeeper, OnProgress
from quire.errors import EngineDeadError, QuireError

ENGINE_COMMAND = (sys.executable, "-m", "quire.assembly.engine_main")
DEFAULT_MAX_QUEUED_REQUESTS = 1024
DEFAULT_RECOVERY = RecoveryConfig()


class AsyncEngine:
    """An engine, whichever process it lives in. Belongs to one event loop."""

    def __init__(self, keeper: EngineKeeper, dispatcher: Dispatcher) -> None:
        """Use `start`."""
        self._keeper = keeper
        self._dispatcher = dispatcher

    @classmethod
    async def start(
        cls,
        options: Mapping[str, object],
        *,
        max_queued_requests: int = DEFAULT_MAX_QUEUED_REQUESTS,
        command: Sequence[str] = ENGINE_COMMAND,
        recovery: RecoveryConfig = DEFAULT_RECOVERY,
        on_progress: OnProgress | None = None,
    ) -> "AsyncEngine":
        """Start the engine process and wait until it is ready for requests.

        options: of `engine.build.build_engine`; numbers, strings, booleans, None, and lists and
            dicts of them.
        max_queued_requests: how many requests may be open, waiting or running; one that asks for n
            samples counts n times.
        command: what to run; `--fd N` and the arguments of logging are appended.
        on_progress: told of what the first process does until it is ready.

        Raises what `build_engine` raised (ConfigurationError and its kin), EngineDeadError if the
        process ended without a word, and MessageError for options that can't be sent. When it
        raises, or is cancelled, the process is gone.
        """
        dispatcher = Dispatcher(max_queued_requests, asyncio.get_running_loop().time)
        keeper = EngineKeeper(options, command, recovery, dispatcher, on_progress)
        await keeper.start()
        return cls(keeper, dispatcher)

    # ---- what it is -------------------------------------------------------------------------

    @property
    def state(self) -> EngineState:
        return self._keeper.state

    @property
    def failure(self) -> QuireError | None:
        """Why it has failed for good; None if it has not."""
        return self._keeper.failure

    @property
    def limits(self) -> ModelLimits:
        """What the engine was built for."""
        assert self._keeper.limits is not None, "the engine was never ready"
        return self._keeper.limits

    @property
    def facts(self) -> Mapping[str, Any]:
        """What the present process was built of, by name, for people (see `build_engine`)."""
        return self._keeper.facts

    @property
    def num_restarts(self) -> int:
        """Processes that were started after the first."""
        return self._keeper.num_restarts

    @property
    def is_alive(self) -> bool:
        """Whether the engine takes requests: now, or as soon as it has recovered."""
        return self.state in (EngineState.READY, EngineState.RECOVERING)

    @property
    def pid(self) -> int | None:
        """Of the process; None while there is none."""
        return self._keeper.pid

    @property
    def num_open(self) -> int:
        """Branches of requests whose end has not come yet."""
        return self._dispatcher.num_open

    @property
    def last_step_age_s(self) -> float:
        """For how long the process has said nothing: it speaks between two steps, and is asked to
        several times within `heartbeat_timeout_s`. 0 while there is none."""
        return self._keeper.silence_s

    # ---- what it does -----------------------------------------------------------------------

    def check_room(self, num_generations: int) -> None:
        """Raises what `generate` would raise now for so many: prompts times n."""
        self._check_alive()
        self._dispatcher.check_room(num_generations)

    def generate(self, *requests: Request) -> RequestStream:
        """Take requests and open one stream for their outputs.

        Raises OverloadedError when they don't all fit among the open requests, EngineDeadError,
        InvalidRequestError for an id that is in use. The stream raises what the engine refuses a
        request with, RequestKillsEngineError for one that is to blame for the death of processes,
        and EngineDeadError if the engine fails for good or is shut down.
        """
        self._check_alive()
        return self._dispatcher.open(requests)

    def abort(self, request_id: str, branch_index: int | None = None) -> None:
        """End a request, or one branch of it, before the engine's next step.

        Its stream goes on without it. Nothing happens for what is not open.
        """
        self._dispatcher.abort(request_id, branch_index)

    async def stats(self, timeout_s: float = 10.0) -> dict[str, Any]:
        """The engine's EngineStats by field name; otherwise as `ask`."""
        return await self.ask(GetStats(), timeout_s)

    async def ask(self, question: Question, timeout_s: float = 10.0) -> dict[str, Any]:
        """The engine's answer, from between two steps: what the reply to the question carries.

        Raises EngineDeadError while the engine recovers, and when no answer comes within timeout_s:
        then no step has ended for so long.
        """
        self._check_alive()
        link = self._keeper.link
        if link is None:
            raise EngineDeadError("the engine is being started again; ask once more in a moment")
        try:
            async with asyncio.timeout(timeout_s):
                return await link.ask(question)
        except TimeoutError as error:
            raise EngineDeadError(
                f"the engine has not answered for {timeout_s:g} s: no step has ended meanwhile"
            ) from error

    async def wait_failed(self) -> QuireError:
        """Wait until the engine has failed for good; returns why."""
        return await self._keeper.wait_failed()

    async def shutdown(
        self, *, drain: bool = True, timeout_s: float = 30.0, reason: QuireError | None = None
    ) -> None:
        """End the process: after its open requests (drain), or at once; by force after timeout_s.

        reason: what open streams raise then. When it returns, or is cancelled, the process is gone.
        May be called twice.
        """
        await self._keeper.shutdown(drain=drain, timeout_s=timeout_s, reason=reason)

    def _check_alive(self) -> None:
        if not self.is_alive:
            raise EngineDeadError("the engine is not running, so it takes no requests")
