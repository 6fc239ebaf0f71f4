"""Reads the fields `tools` and `tool_choice` of chat calls.

Errors name the field `tools` or `tool_choice`. Called by the bodies of chat and /tokenize.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from quire.errors import InvalidRequestError, shown
from quire.text.parsers.tool_use import Tool, ToolMode, ToolUse

_NAME = re.compile(r"[a-zA-Z0-9_.:/-]{1,128}")

_TOOL_FIELDS = ("type", "function", "cache_control")
_FUNCTION_FIELDS = ("name", "description", "parameters", "strict", "cache_control")

# Wrong names for `parameters`, in the form of `_letters`. If they were ignored, the tool would be
# called without arguments.
_OTHER_SCHEMAS = frozenset(
    {
        *(
            "inputschema",
            "argsschema",
            "schema",
            "properties",
            "jsonschema",
            "parametersjsonschema",
        ),
        *("arguments", "args", "param", "params", "parameter", "parameters", "parameterschema"),
        *("parametersschema", "paramters", "paramaters", "parametres"),
    }
)
# Fields of a function that some clients put into the tool, next to the function.
_MISPLACED = ("parameters", "description", "strict")

MAX_LABELS = 100
"""Maximum number of ignored names that are reported, since a header has no room for more."""


def labels_of_tools(tools: Any) -> list[str]:
    """Names of the fields in a chat's tools that have no effect, without duplicates. `tools` is the
    body's value, of any type."""
    found: dict[str, None] = {}
    for tool in tools if isinstance(tools, Sequence) else ():
        if isinstance(tool, Mapping):
            found |= dict.fromkeys(_labels(tool, _TOOL_FIELDS, "tools"))
            function = tool.get("function")
            if isinstance(function, Mapping):
                found |= dict.fromkeys(_labels(function, _FUNCTION_FIELDS, "tools.function"))
        if len(found) > MAX_LABELS:
            break
    return list(found)


def _labels(given: Mapping[str, Any], known: Sequence[str], where: str) -> Iterator[str]:
    """The names of unknown fields that have a value, up to a bound."""
    unknown = (name for name in given if name not in known)
    for name in islice(unknown, MAX_LABELS):
        if given[name] not in (None, False, "", [], {}):
            yield f"{where}.{name}"


def openai_tools(tools: Sequence[Any]) -> tuple[Tool, ...]:
    """The tools of a chat: {"type": "function", "function": {"name": ..., ...}}."""
    return tuple(_openai_tool(tool, f"tools[{at}]") for at, tool in enumerate(tools))


def _openai_tool(tool: Any, place: str) -> Tool:
    if not isinstance(tool, Mapping):
        raise _wrong_tool(f"{place} is {shown(tool)}, but must be an object with a function")
    if tool.get("type", "function") != "function":
        raise _wrong_tool(
            f"{place} has the type {shown(tool['type'])}, but only functions can be called here;"
            " leave it out"
        )
    function = tool.get("function")
    if not isinstance(function, Mapping):
        raise _wrong_tool(f"{place} has no function; it must be an object with a name")
    for name in _MISPLACED:
        if tool.get(name) and function.get(name) is None:
            raise _wrong_tool(f"{place} has {name!r} beside its function; put it into that")
    if function.get("parameters") is None:
        _check_schema(tool, place)
    return function_tool(function, f"{place}.function")


def function_tool(function: Mapping[str, Any], place: str) -> Tool:
    """The tool that an object with name, description, parameters and strict defines. `place` is its
    place in the body. Raises InvalidRequestError."""
    strict = function.get("strict")
    if strict is not None and not isinstance(strict, bool):
        raise _wrong_tool(f"{place}.strict is {shown(strict)}, but must be true or false")
    name, parameters = function.get("name"), function.get("parameters")
    description = function.get("description")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise _wrong_tool(
            f"{place} has the name {shown(name)}, but a name must be 1 to 128 letters, digits and"
            " any of _ - . : /"
        )
    if description is not None and not isinstance(description, str):
        raise _wrong_tool(f"{place}.description is {shown(description)}, but must be a text")
    _check_schema(function, place)
    if parameters is not None and not isinstance(parameters, Mapping):
        raise _wrong_tool(
            f"{place} has parameters of type {type(parameters).__name__}, but they must be a JSON"
            " schema of an object"
        )
    if parameters is not None and parameters.get("type", "object") != "object":
        raise _wrong_tool(
            f"{place} has parameters of the type {shown(parameters['type'])}, but arguments are"
            ' an object: {"type": "object", "properties": {...}}'
        )
    return Tool(name, description, parameters, bool(strict))


def _check_schema(function: Mapping[str, Any], place: str) -> None:
    """Refuse a function or tool whose schema is under a wrong name and would be ignored."""
    if function.get("parameters") is not None:
        return
    for name in islice(function, MAX_LABELS):
        if _letters(name) in _OTHER_SCHEMAS and function[name]:
            raise _wrong_tool(
                f"{place} has {name!r:.80}, but the JSON schema of its arguments must be in"
                " parameters"
            )


def _letters(name: str) -> str:
    """A name in lower case without separators, equal for snake_case and camelCase."""
    return name[:40].replace("_", "").replace("-", "").lower()


def make_tool_use(
    tools: tuple[Tool, ...],
    mode: ToolMode | None,
    callable_names: Collection[str] | None = None,
    *,
    is_parallel: bool = True,
) -> ToolUse:
    """The tools of a call, and which of them may or must be called.

    If `mode` is None, the model decides whether to call a tool. If `callable_names` is None, all
    tools may be called. Raises InvalidRequestError for two tools with one name, for names that no
    tool has, and for a required call without any tool.
    """
    names = {tool.name: tool for tool in tools}
    for tool in tools:
        if names[tool.name] is not tool:
            raise _wrong_tool(f"tools has {tool.name!r} twice; each needs a name of its own")
    if mode is ToolMode.REQUIRED and not (tools if callable_names is None else callable_names):
        raise _wrong_choice("tool_choice demands a call, but there are no tools; give tools")
    for name in callable_names or ():
        if name not in names:
            raise _wrong_choice(
                f"tool_choice names {name!r:.80}, which is not among the tools:"
                f" {', '.join(names)[:500] or 'there are none'}"
            )
    if mode is None:
        mode = ToolMode.AUTO if tools else ToolMode.NONE
    chosen = None if callable_names is None else frozenset(callable_names)
    return ToolUse(tools, mode, chosen, is_parallel)


def read_tool_choice(choice: Any) -> tuple[ToolMode | None, list[str] | None]:
    """The mode and the tool names of a chat's tool_choice, which is a word, a function, or allowed
    tools. A mode or names that tool_choice leaves open are None. Raises InvalidRequestError."""
    if choice is None:
        return None, None
    if choice == "any":  # Mistral's word
        return ToolMode.REQUIRED, None
    if isinstance(choice, str):
        if choice not in tuple(ToolMode):
            raise _wrong_choice(
                f"tool_choice is {shown(choice)}, but must be none, auto, required, or an object"
                " that names a function"
            )
        return ToolMode(choice), None
    if isinstance(choice, Mapping) and choice.get("type") == "function":
        return ToolMode.REQUIRED, [_chosen_name(choice)]
    if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
        return _read_allowed(choice.get("allowed_tools", choice))
    raise _wrong_choice(
        f"tool_choice is {shown(choice)}, but an object must have the type function or"
        " allowed_tools"
    )


def _read_allowed(allowed: Any) -> tuple[ToolMode, list[str]]:
    mode = allowed.get("mode") if isinstance(allowed, Mapping) else None
    if mode not in (ToolMode.AUTO, ToolMode.REQUIRED):
        raise _wrong_choice(
            f"tool_choice allows tools in the mode {shown(mode)}, but it must be auto or required"
        )
    tools = allowed.get("tools")
    if not isinstance(tools, list) or not tools:
        raise _wrong_choice("tool_choice has no list of allowed tools; name at least one")
    return ToolMode(mode), [_chosen_name(tool) for tool in tools]


def _chosen_name(choice: Any) -> str:
    """The tool's name, from chat's form {"function": {"name": ...}} or Responses' {"name": ...}."""
    named = choice.get("function", choice) if isinstance(choice, Mapping) else None
    name = named.get("name") if isinstance(named, Mapping) else None
    if not isinstance(name, str):
        raise _wrong_choice(
            "tool_choice has a function without a name; it must be"
            ' {"type": "function", "function": {"name": ...}}'
        )
    return name


def _wrong_tool(sentence: str) -> InvalidRequestError:
    return InvalidRequestError(sentence, "tools")


def _wrong_choice(sentence: str) -> InvalidRequestError:
    return InvalidRequestError(sentence, "tool_choice")
