"""Anthropic's tools, tool_choice, thinking and formats, as a chat call has them."""

import pytest

from quire.core.structured_outputs import StructuredOutputsParams
from quire.errors import InvalidRequestError
from quire.server.generation.chat_call import ReasoningOptions
from quire.server.routes.anthropic.call_fields import (
    answer_format_of,
    ignored_tools,
    reasoning_of,
    tool_use_of,
)
from quire.text.parsers.tool_use import NO_TOOLS, Tool, ToolMode

SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}}
READ = {"name": "read", "description": "Reads.", "input_schema": SCHEMA}
LIST = {"type": "custom", "name": "list", "input_schema": {"type": "object"}, "strict": True}
SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 3}


def test_tools_of_the_caller_s_own_are_offered():
    found = tool_use_of([READ, SEARCH, LIST], None)
    assert found.tools == (
        Tool("read", "Reads.", SCHEMA),
        Tool("list", None, {"type": "object"}, is_strict=True),
    )
    assert (found.mode, found.callable_names, found.is_parallel) == (ToolMode.AUTO, None, True)


@pytest.mark.parametrize(
    ("choice", "mode", "names", "is_parallel"),
    [
        ({"type": "auto"}, ToolMode.AUTO, None, True),
        ({"type": "auto", "disable_parallel_tool_use": True}, ToolMode.AUTO, None, False),
        ({"type": "any"}, ToolMode.REQUIRED, None, True),
        ({"type": "any", "disable_parallel_tool_use": True}, ToolMode.REQUIRED, None, False),
        ({"type": "tool", "name": "list"}, ToolMode.REQUIRED, {"list"}, False),
        ({"type": "none"}, ToolMode.NONE, None, True),
    ],
)
def test_choices(choice, mode, names, is_parallel):
    found = tool_use_of([READ, LIST], choice)
    assert (found.mode, found.callable_names, found.is_parallel) == (mode, names, is_parallel)


def test_server_side_tools_are_ignored_by_name():
    assert ignored_tools([READ, SEARCH, LIST, {"type": "bash_20250124", "name": "bash"}]) == [
        "tools.1 (web_search_20250305)",
        "tools.3 (bash_20250124)",
    ]
    assert tool_use_of([SEARCH], {"type": "auto"}) == tool_use_of(None, None) == NO_TOOLS


@pytest.mark.parametrize(
    ("tools", "choice", "words", "param"),
    [
        ("read", None, "tools is 'read'", "tools"),
        (["read"], None, "tools.0 is 'read'", "tools"),
        ([{"type": 5}], None, "tools.0 is", "tools"),
        ([{"name": "a b", "input_schema": SCHEMA}], None, "tools.0.name is 'a b'", "tools"),
        ([{"name": "a"}], None, "tools.0.input_schema is None", "tools"),
        ([READ | {"input_schema": {"type": "array"}}], None, "of the type object", "tools"),
        ([READ | {"description": 5}], None, "tools.0.description is 5", "tools"),
        ([READ, READ], None, "two tools of the name 'read'", "tools"),
        ([READ], "auto", "tool_choice is 'auto'", "tool_choice"),
        ([READ], {"type": "required"}, "must be one of auto, any, tool, none", "tool_choice"),
        ([READ], {"type": []}, "must be one of auto, any, tool, none", "tool_choice"),
        ([READ], {"type": "tool"}, "tool_choice.name is None", "tool_choice"),
        ([READ, SEARCH], {"type": "tool", "name": "web_search"}, "none of the", "tool_choice"),
        ([SEARCH], {"type": "any"}, "no tool that can be called here", "tool_choice"),
    ],
)
def test_invalid_tool_choices_are_refused(tools, choice, words, param):
    with pytest.raises(InvalidRequestError) as caught:
        tool_use_of(tools, choice)
    assert words in str(caught.value)
    assert caught.value.param == param


@pytest.mark.parametrize(
    ("thinking", "config", "found"),
    [
        (None, None, ReasoningOptions(is_enabled=False)),
        ({"type": "disabled"}, None, ReasoningOptions(is_enabled=False)),
        (
            {"type": "enabled", "budget_tokens": 2048},
            None,
            ReasoningOptions(is_enabled=True, budget_tokens=2048),
        ),
        (
            {"type": "adaptive", "display": "omitted"},
            {"effort": "high"},
            ReasoningOptions(effort="high", is_enabled=True),
        ),
    ],
)
def test_thinking(thinking, config, found):
    assert reasoning_of(thinking, config) == found


@pytest.mark.parametrize(
    ("thinking", "config", "words"),
    [
        ("on", None, "thinking is 'on'"),
        ({"type": "on"}, None, "its type must be"),
        ({"type": "enabled"}, None, "thinking.budget_tokens is None"),
        ({"type": "enabled", "budget_tokens": True}, None, "thinking.budget_tokens is True"),
        (None, {"effort": "huge"}, "output_config.effort is 'huge'"),
    ],
)
def test_thinking_that_is_not_understood(thinking, config, words):
    with pytest.raises(InvalidRequestError, match=words):
        reasoning_of(thinking, config)


def test_formats_have_two_names():
    form = {"type": "json_schema", "schema": SCHEMA}
    wanted = StructuredOutputsParams(json=SCHEMA)
    assert answer_format_of({"format": form}, None) == wanted
    assert answer_format_of(None, form) == answer_format_of({"format": form}, form) == wanted
    assert answer_format_of({"effort": "low"}, None) is answer_format_of(None, None) is None
    for config, older, words in (
        ({"format": form}, {"type": "json_schema", "schema": {}}, "both set"),
        ({"format": {"type": "text"}}, None, "output_config has the format"),
        (None, {"type": "json_schema"}, "output_format has the format"),
        (5, None, "output_config is 5"),
    ):
        with pytest.raises(InvalidRequestError, match=words):
            answer_format_of(config, older)
