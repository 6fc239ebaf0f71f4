"""Turns Anthropic's tools, tool_choice, thinking and output_config into fields of a chat call.

Called by `messages_body`.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from quire.core.structured_outputs import StructuredOutputsParams
from quire.errors import InvalidRequestError, shown
from quire.server.generation.chat_call import ReasoningOptions
from quire.server.http.body import with_whole_numbers
from quire.text.parsers.tool_use import Tool, ToolMode, ToolUse

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,128}")

_MODES = {
    "auto": ToolMode.AUTO,
    "any": ToolMode.REQUIRED,
    "tool": ToolMode.REQUIRED,
    "none": ToolMode.NONE,
}

_EFFORTS = ("low", "medium", "high", "xhigh", "max")


def tool_use_of(tools: Any, tool_choice: Any) -> ToolUse:
    """The tools that the model is offered. Raises InvalidRequestError.

    If tool_choice names a tool, the model calls it once. Otherwise there may be several calls,
    unless disable_parallel_tool_use is set.
    """
    offered = tuple(_tool(at, tool) for at, tool in _objects(tools) if _is_custom(tool))
    names = set[str]()
    for tool in offered:
        if tool.name in names:
            raise InvalidRequestError(
                f"tools has two tools of the name {shown(tool.name)}; names must differ", "tools"
            )
        names.add(tool.name)
    choice = tool_choice if tool_choice is not None else {"type": "auto"}
    kind = choice.get("type") if isinstance(choice, dict) else None
    if not isinstance(kind, str) or kind not in _MODES:
        raise InvalidRequestError(
            f"tool_choice is {shown(tool_choice)}, but its type must be one of {', '.join(_MODES)}",
            "tool_choice",
        )
    mode = _MODES[kind]
    if mode is ToolMode.REQUIRED and not offered:
        raise InvalidRequestError(
            f"tool_choice is {kind}, but tools has no tool that can be called here: give tools with"
            " a name and an input_schema",
            "tool_choice",
        )
    called = _named_tool(choice, names) if kind == "tool" else None
    return ToolUse(
        offered,
        mode if offered else ToolMode.NONE,
        None if called is None else frozenset([called]),
        called is None and choice.get("disable_parallel_tool_use") is not True,
    )


def ignored_tools(tools: Any) -> list[str]:
    """Names (field and type) of tools that Anthropic defines, which the model is not offered."""
    return [
        f"tools.{at} ({shown(tool['type']).strip(chr(39))})"
        for at, tool in _objects(tools)
        if not _is_custom(tool)
    ]


def reasoning_of(thinking: Any, output_config: Any) -> ReasoningOptions:
    """Whether and for how long the model reasons. Raises InvalidRequestError.

    Without `thinking`, reasoning is off if the template can turn it off, since callers who did not
    ask for reasoning expect the text in the first block.
    """
    effort = output_config.get("effort") if isinstance(output_config, dict) else None
    if effort is not None and effort not in _EFFORTS:
        raise InvalidRequestError(
            f"output_config.effort is {shown(effort)}, but must be one of {', '.join(_EFFORTS)}",
            "output_config",
        )
    kind = "disabled" if thinking is None else None
    if isinstance(thinking, dict):
        kind = thinking.get("type")
    if kind == "enabled":
        return ReasoningOptions(
            effort=effort, is_enabled=True, budget_tokens=_budget(thinking.get("budget_tokens"))
        )
    if kind in ("adaptive", "between_tools"):
        return ReasoningOptions(effort=effort, is_enabled=True)
    if kind == "disabled":
        return ReasoningOptions(effort=effort, is_enabled=False)
    raise InvalidRequestError(
        f"thinking is {shown(thinking)}, but its type must be enabled, adaptive or disabled",
        "thinking",
    )


def shows_thinking(thinking: Any) -> bool:
    """Whether the answer has the text of the reasoning, or only its signature."""
    return not (isinstance(thinking, dict) and thinking.get("display") == "omitted")


def answer_format_of(output_config: Any, output_format: Any) -> StructuredOutputsParams | None:
    """The JSON schema of the text, from output_config or the older output_format; None without a
    schema. Raises InvalidRequestError."""
    if output_config is not None and not isinstance(output_config, dict):
        raise InvalidRequestError(
            f"output_config is {shown(output_config)}, but must be an object", "output_config"
        )
    newer = (output_config or {}).get("format")
    if newer is not None and output_format is not None and newer != output_format:
        raise InvalidRequestError(
            "output_format and its newer name, output_config.format, are both set; give one",
            "output_format",
        )
    form, name = (output_format, "output_format") if newer is None else (newer, "output_config")
    if form is None:
        return None
    if (
        not isinstance(form, dict)
        or form.get("type") != "json_schema"
        or not isinstance(form.get("schema"), dict)
    ):
        raise InvalidRequestError(
            f'{name} has the format {shown(form)}, but a format must be {{"type": "json_schema",'
            ' "schema": {...}}',
            name,
        )
    return StructuredOutputsParams(json=form["schema"])


def _objects(tools: Any) -> Iterator[tuple[int, dict[str, Any]]]:
    if tools is not None and not isinstance(tools, list):
        raise InvalidRequestError(f"tools is {shown(tools)}, but must be a list", "tools")
    for at, tool in enumerate(tools or ()):
        if not isinstance(tool, dict) or not isinstance(tool.get("type", ""), str | None):
            raise InvalidRequestError(
                f"tools.{at} is {shown(tool)}, but must be an object with a name and an"
                " input_schema",
                "tools",
            )
        yield at, tool


def _is_custom(tool: Mapping[str, Any]) -> bool:
    return tool.get("type") in (None, "custom")


def _tool(at: int, tool: Mapping[str, Any]) -> Tool:
    name, schema = tool.get("name"), tool.get("input_schema")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidRequestError(
            f"tools.{at}.name is {shown(name)}, but must be 1 to 128 letters, digits, _ or -",
            "tools",
        )
    if not isinstance(schema, dict) or schema.get("type") != "object":
        raise InvalidRequestError(
            f"tools.{at}.input_schema is {shown(schema)}, but must be a JSON schema of the type"
            " object",
            "tools",
        )
    description = tool.get("description")
    if description is not None and not isinstance(description, str):
        raise InvalidRequestError(
            f"tools.{at}.description is {shown(description)}, but must be a text", "tools"
        )
    return Tool(name, description, schema, tool.get("strict") is True)


def _named_tool(choice: Mapping[str, Any], names: Collection[str]) -> str:
    name = choice.get("name")
    if not isinstance(name, str) or name not in names:
        raise InvalidRequestError(
            f"tool_choice.name is {shown(name)}, which is none of the tools that can be called here"
            f" ({', '.join(sorted(names)):.200})",
            "tool_choice",
        )
    return name


def _budget(value: Any) -> int:
    budget = with_whole_numbers(value)
    if type(budget) is not int or not 1 <= budget < 2**31:
        raise InvalidRequestError(
            f"thinking.budget_tokens is {shown(value)}, but must be a whole number of at least 1",
            "thinking",
        )
    return budget
