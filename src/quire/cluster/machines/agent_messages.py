"""The messages between a front and an agent, beside those that the agent hands on.

front -> agent    OpenEngine first, then StepLimit, KillEngine
agent -> front    EngineDied, last
both              Beat, several times within a heartbeat
"""

from collections.abc import Callable
from typing import TypeAlias

import msgspec

from quire.engine_client.recovery import Death
from quire.ipc import decoder


class OpenEngine(msgspec.Struct, tag="open_engine", array_like=True, frozen=True):
    """Start an engine, or go on with the one that there is, if it was started with the same.

    start: the body of its `Start`. heartbeat_s: a front that says nothing for so long is gone.
    """

    start: bytes
    heartbeat_s: float


class StepLimit(msgspec.Struct, tag="step_limit", array_like=True, frozen=True):
    """A step that takes more seconds hangs, for whoever asks for it."""

    seconds: float


class KillEngine(msgspec.Struct, tag="kill_engine", array_like=True, frozen=True):
    """End the engine's process at once. why: for people."""

    why: str


class Beat(msgspec.Struct, tag="beat", array_like=True, frozen=True):
    """The other end lives, and the link."""


class EngineDied(msgspec.Struct, tag="engine_died", array_like=True, frozen=True):
    """The engine's process is gone, and all that it sent was handed on. The error's code and
    message are for people."""

    death: Death
    code: str
    message: str


ToAgent: TypeAlias = OpenEngine | StepLimit | KillEngine | Beat
FromAgent: TypeAlias = EngineDied | Beat

decode_to_agent: Callable[[bytes], ToAgent] = decoder(ToAgent, "the front")
"""The message in a body. Raises MessageError."""
decode_from_agent: Callable[[bytes], FromAgent] = decoder(FromAgent, "the agent")
"""The same, in the other direction."""
