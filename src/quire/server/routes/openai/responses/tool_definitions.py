"""Converts a Responses body's tools to functions for the model, and function names back to tools.

A namespace's functions become separate functions, named NAMESPACE__NAME. A custom tool, whose
input is free text, becomes a function with one string argument. `ToolNames` maps the model's calls
to the client's tools. Tools that only OpenAI's servers run are left out and listed in a header.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from quire.errors import InvalidRequestError, shown
from quire.server.routes.openai.chat_tools import function_tool, make_tool_use
from quire.text.parsers.tool_use import Tool, ToolMode, ToolUse

MAX_TOOLS = 1024
"""Maximum number of tools of one body, including those in namespaces."""

CUSTOM_ARGUMENT = "input"
"""Name of the only argument of a custom tool's function."""

_CUSTOM_PARAMETERS: Mapping[str, Any] = {
    "type": "object",
    "properties": {CUSTOM_ARGUMENT: {"type": "string"}},
    "required": [CUSTOM_ARGUMENT],
    "additionalProperties": False,
}
_CALLABLE = ("function", "custom")
_ECHOED_FUNCTION = {"description": None, "parameters": None, "strict": None}
_TOOL_FIELDS = ("name", "description", "parameters", "strict")


@dataclass(frozen=True, slots=True)
class ToolName:
    """The name of a tool as the client defines it."""

    name: str
    #: Namespace of the tool; None for a tool outside of namespaces.
    namespace: str | None = None
    is_custom: bool = False


@dataclass(frozen=True, slots=True)
class ToolNames:
    """The tools that a body defines."""

    #: Maps the name of a tool's function to the client's name of the tool.
    by_function: Mapping[str, ToolName] = field(default_factory=dict)
    #: Names of tools that only OpenAI's servers run, for a header of the answer.
    left_out: tuple[str, ...] = ()
    #: The client's definitions of all other tools. Missing fields of functions are set to null.
    served: tuple[dict[str, Any], ...] = ()

    def of(self, function: str) -> ToolName:
        """The tool from which a function was made. For an unknown function, returns a tool with the
        function's name."""
        return self.by_function.get(function) or ToolName(function)


def function_name(name: str, namespace: str | None) -> str:
    """The name by which the model calls a tool."""
    return name if namespace is None else f"{namespace}__{name}"


def read_tools(definitions: Sequence[Any]) -> tuple[tuple[Tool, ...], ToolNames]:
    """Convert tool definitions to functions for the model, and record the tool of each function.

    Raises InvalidRequestError for an invalid definition, for two functions with one name, and if
    the body only has tools that OpenAI's servers run.
    """
    tools: list[Tool] = []
    by_function: dict[str, ToolName] = {}
    left_out, served = [], []
    for at, definition in enumerate(definitions):
        where = f"tools[{at}]"
        kind = _text(definition, "type", where)
        if kind not in (*_CALLABLE, "namespace"):
            left_out.append(f"{where} ({kind:.60})")
            continue
        served.append(_ECHOED_FUNCTION | definition if kind == "function" else definition)
        for name, tool in _functions(definition, kind, where):
            if tool.name in by_function:
                raise _wrong(f"{where} defines {tool.name!r:.80} again; give each tool one name")
            by_function[tool.name] = name
            if name.is_custom and definition.get("format"):
                left_out.append(f"{where}.format")
            tools.append(tool)
            if len(tools) > MAX_TOOLS:
                raise _wrong(f"there are more tools than the bound of {MAX_TOOLS}; send fewer")
    if left_out and not tools:
        raise _wrong(
            f"none of the tools is served here: {', '.join(left_out):.300}; give tools of type"
            " function, custom or namespace, which the client runs, or leave tools out"
        )
    return tuple(tools), ToolNames(by_function, tuple(left_out), tuple(served))


def tool_use(
    tools: tuple[Tool, ...], names: ToolNames, choice: Any, *, is_parallel: bool
) -> ToolUse:
    """The tools, with those that may or must be called according to the body's tool_choice. Raises
    InvalidRequestError."""
    mode, callable_names = _read_choice(choice, names)
    if not tools and mode is not ToolMode.REQUIRED:
        return ToolUse()
    return make_tool_use(tools, mode, callable_names, is_parallel=is_parallel)


def _functions(
    definition: Mapping[str, Any], kind: str, where: str
) -> Iterator[tuple[ToolName, Tool]]:
    if kind != "namespace":
        yield _function(definition, kind, where, None)
        return
    namespace = _text(definition, "name", where)
    inner = definition.get("tools")
    if not isinstance(inner, list):
        raise _wrong(f"{where}.tools is {shown(inner)}, but must be a list of tools")
    for at, each in enumerate(inner):
        inside = f"{where}.tools[{at}]"
        inner_kind = _text(each, "type", inside)
        if inner_kind not in _CALLABLE:
            raise _wrong(
                f"{inside} has the type {inner_kind!r:.60}, but must be a function or custom"
            )
        yield _function(each, inner_kind, inside, namespace)


def _function(
    definition: Mapping[str, Any], kind: str, where: str, namespace: str | None
) -> tuple[ToolName, Tool]:
    known = ToolName(_text(definition, "name", where), namespace, kind == "custom")
    fields = {name: definition.get(name) for name in _TOOL_FIELDS}
    if known.is_custom:
        fields |= {
            "parameters": _CUSTOM_PARAMETERS,
            "strict": True,
            "description": _with_format(fields["description"], definition.get("format")),
        }
    # Pass on all fields of a function, so that a schema under a wrong name is refused.
    tool = function_tool(fields if known.is_custom else {**definition, **fields}, where)
    return known, replace(tool, name=function_name(tool.name, namespace))


def _with_format(description: Any, form: Any) -> Any:
    """A custom tool's description with the grammar of its input appended, so that the model sees
    the grammar."""
    grammar = form.get("definition") if isinstance(form, dict) else None
    if not isinstance(grammar, str):
        return description
    return f"{description}\n\n{grammar}" if description else grammar


def _read_choice(choice: Any, names: ToolNames) -> tuple[ToolMode, frozenset[str] | None]:
    if choice is None:
        return ToolMode.AUTO, None
    if isinstance(choice, str):
        if choice not in tuple(ToolMode):
            raise _wrong(
                f"tool_choice is {choice!r:.60}, but must be none, auto, required, or an object"
                " that names tools",
                "tool_choice",
            )
        return ToolMode(choice), None
    kind = _text(choice, "type", "tool_choice", "tool_choice")
    if kind == "allowed_tools":
        mode, allowed = choice.get("mode", "auto"), choice.get("tools")
        if mode not in ("auto", "required"):
            raise _wrong(
                f"tool_choice.mode is {shown(mode)}, but must be auto or required", "tool_choice"
            )
        if not isinstance(allowed, list) or not allowed:
            raise _wrong("tool_choice.tools must be a list of at least one tool", "tool_choice")
        functions = frozenset(_allowed_functions(allowed, names))
        if not functions:
            raise _wrong("none of tool_choice.tools is served here; name a function", "tool_choice")
        return ToolMode(mode), functions
    return ToolMode.REQUIRED, frozenset([_named_function(choice, names, "tool_choice")])


def _allowed_functions(allowed: Iterable[Any], names: ToolNames) -> Iterator[str]:
    for at, each in enumerate(allowed):
        where = f"tool_choice.tools[{at}]"
        if _text(each, "type", where, "tool_choice") in _CALLABLE:
            yield _named_function(each, names, where)


def _named_function(value: Any, names: ToolNames, where: str) -> str:
    kind = _text(value, "type", where, "tool_choice")
    if kind not in _CALLABLE:
        raise _wrong(
            f"{where} names a tool of type {kind!r:.60}, which is not served here; name a function"
            " or a custom tool",
            "tool_choice",
        )
    name, namespace = _text(value, "name", where, "tool_choice"), value.get("namespace")
    function = function_name(name, namespace if isinstance(namespace, str) else None)
    if function not in names.by_function:
        raise _wrong(f"{where} names {function!r:.80}, which is not among tools", "tool_choice")
    return function


def _text(value: Any, name: str, where: str, param: str = "tools") -> str:
    """The value of a field that must be a string and not empty."""
    if not isinstance(value, dict):
        raise _wrong(f"{where} is {shown(value)}, but must be an object", param)
    found = value.get(name)
    if not isinstance(found, str) or not found:
        raise _wrong(f"{where}.{name} is {shown(found)}, but must be a string", param)
    return found


def _wrong(sentence: str, param: str = "tools") -> InvalidRequestError:
    return InvalidRequestError(sentence, param)
