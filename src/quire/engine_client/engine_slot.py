"""Slots: the places where a fleet starts its engines.

`one_engine` has the slot of a single engine, `cluster` has those of several.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from quire.engine_client.process.link import OpenLink

ONLY_ENGINE = ""
"""Name of the engine of a server without replicas. Reports about it name no replica."""


@dataclass(frozen=True, slots=True)
class EngineSlot:
    """A place where one engine can run, and how to start it there."""

    #: The name of the engine in the fleet.
    name: str
    #: Makes the link that starts the engine's process and talks to it.
    open_link: OpenLink
    #: Options of this engine, in addition to those of the whole fleet.
    options: Mapping[str, object] = field(default_factory=dict)


class EngineSlots(Protocol):
    """Allocates the slots of a fleet's engines."""

    def initial(self) -> Sequence[EngineSlot]:
        """The slots for the engines that the fleet has at its start."""
        ...

    def allocate(self, name: str) -> EngineSlot:
        """Allocate a slot for one more engine, named `name`. Raises ConfigurationError if no slot
        is free."""
        ...

    def release(self, name: str) -> None:
        """Free the slot of an engine that has ended and will not be restarted."""
        ...

    def close(self) -> None:
        """Release the resources of all slots. Called after the last engine has ended."""
        ...
