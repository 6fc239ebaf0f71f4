"""Link from the API server to an engine's process on another machine, through an agent there.

An engine is dead if its agent reports its death, with evidence. It is lost if the connection falls
silent, because the machine is off or the network is cut. Made by `supervisor`.
"""

import asyncio
import contextlib
import ssl
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

from quire.cluster.longest_step import longest_step_s
from quire.cluster.machines import DEFAULT_HEARTBEAT_S
from quire.cluster.machines.agent_messages import (
    EngineDied,
    KillEngine,
    OpenEngine,
    StepLimit,
    decode_from_agent,
)
from quire.cluster.machines.channel import AgentChannel, FrameKind, connect
from quire.engine_client.messages import Fatal, Ready, decode_to_server, start_error_from
from quire.engine_client.process.activity import Activity, Doing, Pace
from quire.engine_client.process.link import UNDEAD_S, EngineLink, LinkOwner, OutputListener
from quire.engine_client.process.outgoing_frames import Frame
from quire.engine_client.recovery import Death, step_limit_s
from quire.errors import EngineDeadError, QuireError

CONNECT_TIMEOUT_S = 5.0

_LENGTH_BYTES = 4

FindAgent: TypeAlias = Callable[[], Awaitable[tuple[str, int]]]
"""Finds the present host and port of an agent. Raises OSError if there is none."""


@dataclass(frozen=True, slots=True)
class AgentAccess:
    """How to reach an agent."""

    #: Finds the agent's address.
    find: FindAgent
    #: The TLS settings of the cluster's key.
    tls: ssl.SSLContext
    #: Identifies this API server's process and the replica. All connections for the replica send
    #: the same id.
    server_id: str
    #: Seconds without a message after which the agent counts as lost.
    heartbeat_s: float = DEFAULT_HEARTBEAT_S


class RemoteLink(EngineLink):
    """A link through an agent."""

    ends_process = False  # the agent keeps it for another server

    def __init__(self, owner: LinkOwner, listener: OutputListener, access: AgentAccess) -> None:
        super().__init__(owner, listener)
        self._access = access
        self._channel: AgentChannel | None = None
        self._died: EngineDied | None = None

    @property
    def pid(self) -> int | None:
        """Always None, since the process is not on this machine."""
        return None

    @property
    def is_open(self) -> bool:
        return self._channel is not None

    async def open(self, start_frame: bytes) -> None:
        """See `EngineLink`."""
        access = self._access
        host, port = await access.find()  # `find` has its own time limit
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                self._channel = await connect(host, port, access.tls, access.server_id, self)
        except TimeoutError as error:
            raise ConnectionRefusedError(
                f"the agent did not answer within {CONNECT_TIMEOUT_S:g} s"
            ) from error
        self._channel.send_message(OpenEngine(start_frame[_LENGTH_BYTES:], access.heartbeat_s))
        self._channel.beat(access.heartbeat_s)

    def send(self, frame: Frame) -> None:
        """See `EngineLink`."""
        if self._channel is not None:
            for each in (frame,) if isinstance(frame, bytes) else frame:
                self._channel.send(FrameKind.ENGINE, each[_LENGTH_BYTES:])

    def watch(self, timeout_s: float | None) -> None:
        """See `EngineLink`. The progress is not known here, so each step gets the time of the
        longest one. Also sends the limit to the agent, which applies the limit once this API server
        is gone."""
        if self._pulse is None and self._channel is not None:
            limit_s = timeout_s or step_limit_s(self._read_pace().predicted_s)
            self._channel.send_message(StepLimit(limit_s))
        super().watch(timeout_s)

    def kill(self, why: str) -> None:
        """See `EngineLink`. An agent that can't be reached ends the engine by itself."""
        if self._channel is not None:
            self._killed_because = self._killed_because or why
            self._undead = self._undead or self._loop.call_later(UNDEAD_S, self._abort_connection)
            self._channel.send_message(KillEngine(why))

    async def close(self) -> None:
        """See `EngineLink`."""
        if self._channel is not None:
            self.kill("it was shut down")
            self._channel.close()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CONNECT_TIMEOUT_S):
                    await asyncio.shield(self._dead.wait())
            self._channel.abort()
            await asyncio.shield(self._dead.wait())

    def _abort_connection(self) -> None:
        """See `EngineLink`. The engine counts as lost."""
        if self._channel is not None:
            self._channel.abort()

    # ---- for the channel --------------------------------------------------------------------

    def on_frame(self, kind: FrameKind, body: bytes) -> None:
        """See `FrameHandler`."""
        self.last_heard_s = self._loop.time()
        if kind is FrameKind.ENGINE:
            received = decode_to_server(body)
            if isinstance(received, Ready):
                pace = Pace(0, longest_step_s(received.limits, received.facts))
                self._read_pace = lambda: pace
            self._receive(received)
            return
        message = decode_from_agent(body)
        if isinstance(message, EngineDied):
            self._died = message
            if self._channel is not None:
                self._channel.close()

    def on_closed(self) -> None:
        """See `FrameHandler`."""
        self.connection_lost(None)

    async def _await_exit(self) -> tuple[QuireError, Death]:
        if self._died is None:
            why = self._killed_because or "its machine can't be reached, or its agent has ended"
            return (
                EngineDeadError(f"the engine is lost: {why}"),
                Death(Activity(Doing.IDLE), None, is_lost=True),
            )
        death = replace(self._died.death, has_hung=self._has_hung)
        if self._killed_because is not None:
            return (
                EngineDeadError(f"the engine process has ended: {self._killed_because}"),
                replace(death, status=None),
            )
        return start_error_from(Fatal(self._died.code, self._died.message)), death


def with_engine_id(ready: Ready, engine_id: str) -> Ready:
    """A copy of `ready` whose facts include `engine_id`, the id of the engine's process."""
    return Ready(ready.limits, {**ready.facts, "engine_id": engine_id})
