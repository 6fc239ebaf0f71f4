"""Tool calls in a history: what is refused, and what templates get."""

import json
from typing import Any

import pytest

from quire.errors import InvalidRequestError
from quire.text.tool_messages import (
    MAX_CALL_VALUES,
    check_tool_calls,
    with_calls_as_text,
    with_tools_as_text,
)

FUNCTION = {"name": "f", "arguments": '{"a": 1}'}
CALL = {"id": "1", "type": "function", "function": FUNCTION}


@pytest.mark.parametrize(
    ("calls", "words"),
    [
        ({}, "tool_calls of type dict, not a list"),
        (["f"], r"tool_calls\[0\] is a str"),
        ([CALL, {"type": "custom"}], r"tool_calls\[1\] has the type 'custom'"),
        ([{"id": "1"}], "has no function"),
        ([CALL | {"id": [1]}], r"tool_calls\[0\].id is \[1\]"),
        ([{"function": {"arguments": "{}"}}], "has no name"),
        ([{"function": {"name": ""}}], "has no name"),
        ([{"function": {"name": "f", "arguments": [1]}}], "neither an object nor its JSON text"),
    ],
)
def test_invalid_tool_calls_are_refused(calls: Any, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words) as caught:
        check_tool_calls(calls, "messages[0]")
    assert caught.value.param == "messages"


@pytest.mark.parametrize("arguments", ["{}", "", "{", {"a": 1}, None])
def test_arguments_may_be_an_object_or_any_text(arguments: Any) -> None:
    check_tool_calls([{"function": {"name": "f", "arguments": arguments}}], "messages[0]")


def test_results_of_one_turn_are_one_message() -> None:
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "a"},
        {
            "role": "assistant",
            "content": "I look.",
            "tool_calls": [CALL, {"id": "2", "function": {"name": "g"}}],
        },
        {"role": "tool", "tool_call_id": "2", "content": "two"},
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "one"}]},
        {"role": "user", "content": "b"},
        {"role": "tool", "tool_call_id": "other", "content": "lost"},
    ]
    written = '[{"name": "f", "parameters": {"a": 1}}, {"name": "g", "parameters": {}}]'
    assert with_calls_as_text(messages) == [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": f"I look.\n{written}"},
        {"role": "user", "content": "Result of g:\ntwo\n\nResult of f:\none"},
        {"role": "user", "content": "b"},
        {"role": "user", "content": "Result of the tool:\nlost"},
    ]


@pytest.mark.parametrize("role", ["system", "developer"])
def test_tools_are_described_behind_what_the_system_says(role: str) -> None:
    tools = [{"type": "function", "function": {"name": "f", "description": "ü"}}]
    user = {"role": "user", "content": "a"}
    (made, left) = with_tools_as_text([user], tools)
    assert (made["role"], left) == ("system", user)
    assert '\n{"name": "f", "description": "ü"}\n' in made["content"]
    (extended, _) = with_tools_as_text([{"role": role, "content": "Be brief."}, user], tools)
    assert extended == {"role": role, "content": f"Be brief.\n\n{made['content']}"}


@pytest.mark.parametrize("form", [lambda value: value, json.dumps])
def test_the_arguments_of_a_call_have_a_bound(form: Any) -> None:
    def calls(count: int) -> list[Any]:
        function = {"name": "f", "arguments": form({"a": [1] * count})}
        return [{"type": "function", "function": function}]

    check_tool_calls(calls(MAX_CALL_VALUES - 2), "messages[1]")
    sentence = r"messages\[1\].tool_calls\[0\] has arguments with more values, .* than the limit of"
    with pytest.raises(InvalidRequestError, match=sentence):
        check_tool_calls(calls(MAX_CALL_VALUES + 1), "messages[1]")
