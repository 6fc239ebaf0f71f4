"""Messages between an API server and an agent, in addition to the engine's messages.

API server -> agent    ServerGreeting first, then OpenEngine, StepLimit, KillEngine
agent -> API server    Welcome or Refused first; EngineDied, last
both                   Beat, several times per heartbeat interval
"""

from collections.abc import Callable
from typing import TypeAlias

import msgspec

from quire.engine_client.recovery import Death
from quire.ipc import decoder

VERSION = 3
"""Version of the messages and of their framing."""


class ServerGreeting(msgspec.Struct, tag="server_greeting", array_like=True, frozen=True):
    """The first message that an API server sends over a new connection."""

    version: int
    #: Identifies the API server's process and the replica. All connections for that replica send
    #: the same id.
    server_id: str


class Welcome(msgspec.Struct, tag="welcome", array_like=True, frozen=True):
    """The agent accepts the API server."""


class Refused(msgspec.Struct, tag="refused", array_like=True, frozen=True):
    """The agent refuses the API server and closes the connection."""

    #: The reason, for people.
    message: str


class OpenEngine(msgspec.Struct, tag="open_engine", array_like=True, frozen=True):
    """Start an engine, or use the present one if it was started with the same options."""

    #: The body of the engine's `Start` message.
    start: bytes
    #: Seconds without a message after which the API server counts as gone.
    heartbeat_s: float


class StepLimit(msgspec.Struct, tag="step_limit", array_like=True, frozen=True):
    """Set the step time in seconds beyond which the engine counts as hanging."""

    seconds: float


class KillEngine(msgspec.Struct, tag="kill_engine", array_like=True, frozen=True):
    """End the engine's process at once."""

    #: The reason, for people.
    why: str


class Beat(msgspec.Struct, tag="beat", array_like=True, frozen=True):
    """Shows that the sender and the connection are alive."""


class EngineDied(msgspec.Struct, tag="engine_died", array_like=True, frozen=True):
    """The engine's process is gone. Sent after all messages of the process were passed on."""

    death: Death
    #: Code and message of the error that ended the engine.
    code: str
    message: str


ToAgent: TypeAlias = OpenEngine | StepLimit | KillEngine | Beat
FromAgent: TypeAlias = EngineDied | Beat

decode_greeting: Callable[[bytes], ServerGreeting] = decoder(ServerGreeting, "an API server")
"""Decodes the first message from an API server. Raises MessageError."""
decode_answer: Callable[[bytes], Welcome | Refused] = decoder(Welcome | Refused, "an agent")
"""Decodes the first message from an agent. Raises MessageError."""
decode_to_agent: Callable[[bytes], ToAgent] = decoder(ToAgent, "the API server")
"""Decodes a message from an API server. Raises MessageError."""
decode_from_agent: Callable[[bytes], FromAgent] = decoder(FromAgent, "the agent")
"""Decodes a message from an agent. Raises MessageError."""
