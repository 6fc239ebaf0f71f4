"""Messages are checked with the position and the reason of what is wrong."""

from enum import StrEnum
from types import MappingProxyType
from typing import Any

import pytest

from quire.errors import InvalidRequestError
from quire.text.chat_messages import (
    MAX_NESTING,
    check_messages,
    plain_value,
    with_joined_parts,
    with_role_renamed,
    with_text_as_parts,
)

HI = {"role": "user", "content": "hi"}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
PARTS = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]


def nested(num_levels: int) -> Any:
    value: Any = "x"
    for _ in range(num_levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    "messages, words",
    [
        ("hi", "is a str, but must be a list"),
        ({"role": "user"}, "is a dict, but must be a list"),
        (None, "is a NoneType"),
        ([], "messages is empty"),
        ([HI, "hi"], r"messages\[1\] is a str"),
        ([{"content": "hi"}], r"messages\[0\] has the role None"),
        ([{"role": "", "content": "hi"}], "has the role ''"),
        ([{"role": 3, "content": "hi"}], "has the role 3"),
        # A million values are not written out first.
        ([{"role": [1] * 9, "content": "hi"}], r"has the role \[1, 1, 1, 1, 1, 1, \.\.\.\], but"),
        (
            [{"role": "user", "content": [{"type": [1] * 9}]}],
            r"content part of type \[1, 1, 1, 1, 1, 1, \.\.\.\] at position 0",
        ),
        ([{"role": "user"}], r"messages\[0\] has no content"),
        ([{"role": "user", "content": None}], "has no content"),
        ([{"role": "user", "content": 3}], "content of type int"),
        ([{"role": "user", "content": {"text": "a"}}], "content of type dict"),
        ([{"role": "user", "content": ["a"]}], "part of type 'str' at position 0"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "'image_url'.*only text"),
        ([{"role": "user", "content": [PARTS[0], {"type": "text"}]}], "at position 1"),
        ([{"role": "user", "content": "hi", "extra": object()}], "contains a object"),
        ([{"role": "assistant", "content": "hi", "audio": {"id": "x"}}], "has audio, which is not"),
        ([HI, {"role": "assistant", "function_call": {}}], "function_call.*old form of tool_calls"),
        ([{"role": "tool", "content": None}], "has no content"),
        ([{"role": "tool", "content": "a", "tool_call_id": {}}], "tool_call_id is {}"),
        (
            [{"role": "user", "content": [PARTS[0] | {"prompt_cache_breakpoint": {}}]}],
            "has .prompt_cache_breakpoint. in its text part at position 0",
        ),
        ([{"role": "user", "content": "hi", "name": nested(65)}], "more than 64 levels deep"),
    ],
)
def test_what_is_wrong_is_said(messages: Any, words: str) -> None:
    with pytest.raises(InvalidRequestError, match=words) as caught:
        check_messages(messages)
    assert caught.value.param == "messages"


def test_checked_messages_are_plain_copies() -> None:
    message = MappingProxyType({"role": "user", "content": (MappingProxyType(PARTS[0]),)})
    (checked,) = check_messages((message,))
    assert checked == {"role": "user", "content": [PARTS[0]]}
    assert type(checked["content"][0]) is dict


def test_fields_that_are_none_are_dropped() -> None:
    named = {"role": "user", "content": "a", "name": None}
    assert check_messages([named]) == [{"role": "user", "content": "a"}]


@pytest.mark.parametrize("content", [{}, {"content": None}])
def test_a_message_that_only_calls_has_an_empty_text(content: dict[str, Any]) -> None:
    called = {"role": "assistant", "tool_calls": [CALL], **content}
    assert check_messages([called]) == [
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
    ]


def test_a_refusal_is_a_content() -> None:
    refused = {"role": "assistant", "content": None, "refusal": "No."}
    in_parts = {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]}
    assert [message["content"] for message in check_messages([refused, in_parts])] == [
        "No.",
        [{"type": "text", "text": "No."}],
    ]


def test_marks_for_caches_are_left_out() -> None:
    mark = {"cache_control": {"type": "ephemeral"}}
    marked = {"role": "user", "content": [PARTS[0] | mark, PARTS[1]], **mark}
    assert check_messages([marked]) == [{"role": "user", "content": PARTS}]


def test_what_a_tool_says_is_one_text() -> None:
    result = {"role": "tool", "tool_call_id": "1", "content": PARTS}
    assert check_messages([result])[0]["content"] == "a\nb"


@pytest.mark.parametrize("name", ["reasoning_content", "thinking", "reasoning"])
def test_reasoning_goes_under_the_names_that_templates_read(name: str) -> None:
    (checked,) = check_messages([{"role": "assistant", "content": "x", name: "because"}])
    assert checked["reasoning_content"] == checked["thinking"] == "because"


def test_contents_change_their_form() -> None:
    mixed = [HI, {"role": "user", "content": PARTS}, {"role": "assistant", "tool_calls": []}]
    assert [m.get("content") for m in with_joined_parts(mixed)] == ["hi", "a\nb", None]
    as_parts = [m.get("content") for m in with_text_as_parts(mixed)]
    assert as_parts == [[{"type": "text", "text": "hi"}], PARTS, None]


def test_plain_value_strips_enumerations_and_refuses_objects() -> None:
    class Role(StrEnum):
        USER = "user"

    plain = plain_value({"a": [Role.USER, 1.5, None, True]}, "x")
    assert plain == {"a": ["user", 1.5, None, True]} and type(plain["a"][0]) is str
    with pytest.raises(InvalidRequestError, match="x contains a set") as caught:
        plain_value([{"a": {1}}], "x")
    assert caught.value.param == "x"


def test_values_may_be_nested_but_not_endlessly() -> None:
    assert plain_value(nested(MAX_NESTING), "x") == nested(MAX_NESTING)
    for too_deep in (nested(MAX_NESTING + 1), {"a": nested(MAX_NESTING)}, nested(100_000)):
        with pytest.raises(InvalidRequestError, match="x is nested more than 64 levels") as caught:
            plain_value(too_deep, "x")
        assert caught.value.param == "x"


def test_a_part_may_have_fields_that_are_null() -> None:
    part = PARTS[0] | {"prompt_cache_breakpoint": None}
    (checked,) = check_messages([{"role": "user", "content": [part]}])
    assert checked["content"][0]["text"] == "a"


def test_a_role_can_be_renamed() -> None:
    messages = [{"role": "developer", "content": "a"}, HI]
    assert with_role_renamed(messages, "developer", "system") == [
        {"role": "system", "content": "a"},
        HI,
    ]
    assert messages[0]["role"] == "developer"
