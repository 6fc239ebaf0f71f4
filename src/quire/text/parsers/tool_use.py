"""Which tools a call offers to the model, and how it may use them.

Plain data, the same for all APIs. Read by chat templates (as OpenAI's objects), by the parsers'
dialects and by the grammars made from those.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class ToolMode(StrEnum):
    """Whether the answer calls tools."""

    AUTO = "auto"  # the model decides
    NONE = "none"  # it does not
    REQUIRED = "required"  # at least one call


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the caller runs.

    parameters: a JSON schema of one object; None: the function takes no arguments.
    is_strict: calls obey `parameters` exactly, whatever the mode.
    """

    name: str
    description: str | None = None
    parameters: Mapping[str, Any] | None = None
    is_strict: bool = False

    def as_openai(self) -> dict[str, Any]:
        """As chat templates take it: {"type": "function", "function": {...}}."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        function["parameters"] = self.parameters or {"type": "object", "properties": {}}
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """tools: shown to the model. callable_names: those that may be called; None: all.

    is_parallel: whether one message may call more than one.
    """

    tools: tuple[Tool, ...] = ()
    mode: ToolMode = ToolMode.NONE
    callable_names: frozenset[str] | None = None
    is_parallel: bool = True

    @property
    def callable_tools(self) -> tuple[Tool, ...]:
        """Those that the answer may call: none where the mode is NONE."""
        if self.mode is ToolMode.NONE:
            return ()
        names = self.callable_names
        return tuple(tool for tool in self.tools if names is None or tool.name in names)


NO_TOOLS = ToolUse()
