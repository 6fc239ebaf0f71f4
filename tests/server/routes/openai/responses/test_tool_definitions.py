"""Tools of all types become functions of one, and their calls become theirs again."""

import pytest

from quire.errors import InvalidRequestError
from quire.server.routes.openai.responses.tool_definitions import (
    MAX_TOOLS,
    ToolName,
    read_tools,
    tool_use,
)
from quire.text.parsers.tool_use import ToolMode, ToolUse

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = {"type": "function", "name": "weather", "parameters": SCHEMA, "strict": True}
PATCH = {"type": "custom", "name": "apply_patch", "description": "edits files"}
AGENTS = {
    "type": "namespace",
    "name": "agents",
    "description": "",
    "tools": [{"type": "function", "name": "spawn"}, {"type": "custom", "name": "say"}],
}
ALL = [WEATHER, PATCH, AGENTS, {"type": "web_search"}]


def use(choice, definitions=ALL, *, is_parallel=True):
    tools, names = read_tools(definitions)
    return tool_use(tools, names, choice, is_parallel=is_parallel)


def mistake(call, *arguments):
    with pytest.raises(InvalidRequestError) as caught:
        call(*arguments)
    return caught.value


def test_each_tool_is_a_function_for_the_model():
    tools, names = read_tools(ALL)
    assert [tool.name for tool in tools] == [
        "weather",
        "apply_patch",
        "agents__spawn",
        "agents__say",
    ]
    assert (tools[0].parameters, tools[0].is_strict) == (SCHEMA, True)
    assert tools[1].parameters["required"] == ["input"] and tools[1].is_strict
    assert (tools[2].parameters, tools[2].is_strict) == (None, False)
    assert names.left_out == ("tools[3] (web_search)",)
    assert list(names.served) == [{"description": None} | WEATHER, PATCH, AGENTS]


def test_a_call_is_named_as_the_client_knows_it():
    _, names = read_tools(ALL)
    assert names.of("weather") == ToolName("weather")
    assert names.of("agents__spawn") == ToolName("spawn", "agents")
    assert names.of("agents__say") == ToolName("say", "agents", is_custom=True)
    assert names.of("made_up") == ToolName("made_up")


def test_the_grammar_of_a_custom_tool_is_told_to_the_model_and_to_the_client():
    form = {"type": "grammar", "syntax": "lark", "definition": 'start: "x"'}
    (tool,), names = read_tools([PATCH | {"format": form}])
    assert tool.description == 'edits files\n\nstart: "x"'
    assert names.left_out == ("tools[0].format",)


@pytest.mark.parametrize(
    ("choice", "mode", "names"),
    [
        (None, ToolMode.AUTO, None),
        ("auto", ToolMode.AUTO, None),
        ("none", ToolMode.NONE, None),
        ("required", ToolMode.REQUIRED, None),
        ({"type": "function", "name": "weather"}, ToolMode.REQUIRED, {"weather"}),
        ({"type": "custom", "name": "apply_patch"}, ToolMode.REQUIRED, {"apply_patch"}),
        (
            {"type": "function", "name": "spawn", "namespace": "agents"},
            ToolMode.REQUIRED,
            {"agents__spawn"},
        ),
        (
            {"type": "allowed_tools", "mode": "auto", "tools": [WEATHER, {"type": "web_search"}]},
            ToolMode.AUTO,
            {"weather"},
        ),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [WEATHER, PATCH]},
            ToolMode.REQUIRED,
            {"weather", "apply_patch"},
        ),
    ],
)
def test_tool_choice_says_what_may_be_called(choice, mode, names):
    found = use(choice, is_parallel=False)
    assert (found.mode, found.callable_names) == (mode, names)
    assert len(found.tools) == 4 and not found.is_parallel


def test_without_tools_there_is_nothing_to_choose():
    assert use("auto", []) == use("none", []) == ToolUse()
    assert mistake(use, "required", []).param == "tool_choice"


@pytest.mark.parametrize(
    ("definitions", "said"),
    [
        ([5], "tools[0] is 5"),
        ([{}], "tools[0].type is None"),
        ([{"type": "function"}], "tools[0].name is None"),
        ([WEATHER | {"parameters": []}], "tools[0] has parameters of type list"),
        ([WEATHER | {"parameters": None, "inputSchema": {"type": "object"}}], "in parameters"),
        ([WEATHER | {"strict": "yes"}], "tools[0].strict is 'yes'"),
        ([WEATHER | {"description": 1}], "tools[0].description is 1"),
        ([WEATHER | {"name": "a b"}], "tools[0] has the name 'a b'"),
        ([WEATHER, WEATHER], "tools[1] defines 'weather' again"),
        ([AGENTS | {"tools": None}], "tools[0].tools is None"),
        ([AGENTS | {"tools": [{"type": "mcp"}]}], "tools[0].tools[0] has the type 'mcp'"),
        ([{"type": "web_search"}], "none of the tools is served here: tools[0] (web_search)"),
        ([{"type": "function", "name": f"f{at}"} for at in range(MAX_TOOLS + 1)], "bound of 1024"),
    ],
)
def test_a_definition_that_is_not_understood_is_named(definitions, said):
    error = mistake(read_tools, definitions)
    assert said in str(error) and error.param == "tools"


@pytest.mark.parametrize(
    ("choice", "said"),
    [
        ("any", "tool_choice is 'any'"),
        ({"type": "web_search"}, "type 'web_search', which is not served here"),
        ({"type": "function", "name": "unknown"}, "names 'unknown', which is not among tools"),
        ({"type": "function"}, "tool_choice.name is None"),
        ({"type": "allowed_tools", "tools": []}, "at least one tool"),
        (
            {"type": "allowed_tools", "mode": "none", "tools": [WEATHER]},
            "tool_choice.mode is 'none'",
        ),
        ({"type": "allowed_tools", "tools": [{"type": "mcp"}]}, "none of tool_choice.tools"),
        ({"type": "allowed_tools", "tools": [3]}, "tool_choice.tools[0] is 3"),
    ],
)
def test_a_choice_that_is_not_understood_is_named(choice, said):
    error = mistake(use, choice)
    assert said in str(error) and error.param == "tool_choice"
