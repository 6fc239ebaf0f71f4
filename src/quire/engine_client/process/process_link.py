"""Link to an engine process on this machine, over a socket.

Made by `supervisor`.
"""

import asyncio
import contextlib
import signal
from collections.abc import Sequence

from quire.child_process import StartText, last_line
from quire.engine_client.messages import start_error_from
from quire.engine_client.process.activity import ActivityRecord
from quire.engine_client.process.early_process import ENGINE_COMMAND, EarlyProcess, EngineEnds
from quire.engine_client.process.link import UNDEAD_S, EngineLink, LinkOwner, OutputListener
from quire.engine_client.recovery import Death
from quire.errors import EngineDeadError, QuireError
from quire.observability import log
from quire.observability.machine_memory import num_oom_kills

_REAP_TIMEOUT_S = 2.0

logger = log.get_logger(__name__)


class ProcessLink(EngineLink):
    """A link to a local process. However the link ends, its process is ended, unless the system
    can't end it."""

    def __init__(
        self,
        owner: LinkOwner,
        listener: OutputListener,
        command: Sequence[str] = ENGINE_COMMAND,
        early: EarlyProcess | None = None,
    ) -> None:
        """The arguments of `EngineEnds` are appended to `command`. `early` is a process that has
        started; None if `open` starts one."""
        super().__init__(owner, listener)
        self._command = command
        self._early = early
        self._process: asyncio.subprocess.Process | EarlyProcess | None = None
        #: The record that the process writes; None before `open`.
        self._record: ActivityRecord | None = None
        #: Text that the process writes to stderr before it has started; None before `open`, closed
        #: at the process's end.
        self._start_text: StartText | None = None
        #: The system's count of out-of-memory kills when the process was last known to live.
        self._num_oom_kills: int | None = None

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    async def open(self, start_frame: bytes) -> None:
        """See `EngineLink`."""
        # First, start the process, or take the one that has started.
        if self._early is None:
            self._num_oom_kills = num_oom_kills()
            ends = EngineEnds()
            try:
                self._process = await asyncio.create_subprocess_exec(
                    *self._command, *ends.arguments, **ends.options
                )
            except BaseException:
                ends.close()
                raise
            finally:
                ends.close_inherited()
        else:
            self._process, ends = self._early, self._early.ends
            self._early.is_taken, self._num_oom_kills = True, self._early.num_oom_kills
        self._record, self._start_text = ends.record, ends.start_text
        self._read_pace = ends.record.pace
        # Then connect this process's end of the socket to this object.
        try:
            await self._loop.create_unix_connection(lambda: self, sock=ends.sock)
        except BaseException:
            self.kill("it was not wanted any more")
            await self._process.wait()
            self._start_text.close()
            raise
        self.send(start_frame)

    def kill(self, why: str) -> None:
        """See `EngineLink`."""
        if self._process is not None and self._process.returncode is None:
            self._killed_because = self._killed_because or why
            self._undead = self._undead or self._loop.call_later(UNDEAD_S, self._abort_connection)
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    def record_life(self) -> None:
        """Record that the process is alive, so that earlier out-of-memory kills don't count as
        kills of this process."""
        self._num_oom_kills = num_oom_kills()

    def _record_pulse(self) -> None:
        self.record_life()
        super()._record_pulse()

    async def _await_exit(self) -> tuple[QuireError, Death]:
        process = self._process
        assert process is not None
        # First, wait for the process, then kill it and wait again.
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_REAP_TIMEOUT_S):
                await process.wait()
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.0 if self._is_aborted else UNDEAD_S):
                    await process.wait()
        if process.returncode is None:
            logger.error("process %d can't be ended; it is left behind", process.pid)
            self._killed_because = self._killed_because or "it could not be ended"
        # Then read what the process wrote before it had started, which may be the only reason
        # known.
        assert self._start_text is not None
        said = self._start_text.read()
        self._start_text.close()
        if said:
            logger.error("the engine process wrote before it had started:\n%s", said)
        return self._explain_death(process.returncode, said)

    def _explain_death(self, status: int | None, said: str) -> tuple[QuireError, Death]:
        """The reason of a death: a message for people, and the evidence.

        `status` is the exit status; None means that the process was killed and has not ended.
        `said` is what the process wrote before it had started.
        """
        assert self._record is not None
        fatal, killed_because = self._fatal, self._killed_because
        before, now = self._num_oom_kills, num_oom_kills()
        rank_status = None if fatal is None else fatal.rank_status
        death = Death(
            self._record.read(),
            rank_status or (None if killed_because is not None else status),
            has_failed=fatal is not None,
            has_hung=self._has_hung,
            num_oom_kills=None if before is None or now is None else now - before,
        )
        if fatal is not None:
            return start_error_from(fatal), death
        if killed_because is not None:
            return EngineDeadError(f"the engine process has ended: {killed_because}"), death
        assert status is not None, "it was killed"
        how = _describe(status, death.num_oom_kills)
        return EngineDeadError(f"the engine process has ended {how}{last_line(said)}"), death


def _describe(status: int, num_oom_kills: int | None) -> str:
    if status >= 0:
        return f"with exit code {status}"
    names = {member.value: f" ({member.name})" for member in signal.Signals}
    how = f"by signal {-status}{names.get(-status, '')}"  # signals for real time have no names
    if status != -signal.SIGKILL:
        return how
    if num_oom_kills is None:
        return f"{how}; the system does that when memory runs out"
    if num_oom_kills:
        return f"{how}: the system did that because memory ran out"
    return f"{how}, from outside: the system has killed nothing here for lack of memory"
