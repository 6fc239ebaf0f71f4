"""The tools that a request offers to the model, and how the model may use them.

All APIs use these classes. Chat templates (which get OpenAI's objects), parsers and grammars read
them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class ToolMode(StrEnum):
    """Whether the model may, must or must not call tools."""

    AUTO = "auto"  # the model decides whether to call tools
    NONE = "none"  # the answer has no calls
    REQUIRED = "required"  # the answer has at least one call


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the caller runs."""

    name: str
    description: str | None = None
    #: The JSON schema of the object with the arguments; None if the function takes no arguments.
    parameters: Mapping[str, Any] | None = None
    #: True if calls must obey `parameters` exactly in every mode.
    is_strict: bool = False

    def as_openai(self) -> dict[str, Any]:
        """The tool in the format of chat templates: {"type": "function", "function": {...}}."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        function["parameters"] = self.parameters or {"type": "object", "properties": {}}
        return {"type": "function", "function": function}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of a request and the rules for calling them."""

    #: The tools that the prompt describes to the model.
    tools: tuple[Tool, ...] = ()
    mode: ToolMode = ToolMode.NONE
    #: The names of the tools that may be called; None means all.
    callable_names: frozenset[str] | None = None
    #: Whether a message may have several calls.
    is_parallel: bool = True

    @property
    def callable_tools(self) -> tuple[Tool, ...]:
        """The tools that the answer may call; empty if the mode is NONE."""
        if self.mode is ToolMode.NONE:
            return ()
        names = self.callable_names
        return tuple(tool for tool in self.tools if names is None or tool.name in names)


NO_TOOLS = ToolUse()
