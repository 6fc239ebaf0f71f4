"""Messages are checked with the position and the reason of what is wrong."""

from enum import StrEnum
from types import MappingProxyType
from typing import Any

import pytest

from quire.errors import InvalidRequestError
from quire.text.chat_messages import (
    MAX_NESTING,
    check_messages,
    check_roles,
    plain_value,
    with_joined_parts,
    with_role_renamed,
    with_text_as_parts,
    without_labels,
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
        ([{"role": "user", "parts": PARTS}], "has no content"),
        ([{"role": "user", "content": "hi", "images": ["aGk="]}], "images, which is not supported"),
        (
            [{"role": "user", "content": [PARTS[0] | {"image_url": {"url": "x"}}]}],
            r"messages\[0\] in its text part at position 0 has image_url",
        ),
        ([{"role": "user", "content": 3}], "content of type int"),
        ([{"role": "user", "content": {"text": "a"}}], "content of type dict"),
        ([{"role": "user", "content": ["a"]}], "part of type 'str' at position 0"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "'image_url'.*only text"),
        ([{"role": "user", "content": [PARTS[0], {"type": "text"}]}], "at position 1"),
        ([{"role": "user", "content": "hi", "extra": object()}], "contains a object"),
        ([{"role": "assistant", "content": "hi", "audio": {"id": "x"}}], "has audio, which is not"),
        (
            [HI, {"role": "assistant", "function_call": {"name": "f"}}],
            "function_call.*old form of tool_calls",
        ),
        ([{"role": "tool"}], "has no content"),
        ([{"role": "tool", "content": "a", "tool_call_id": {}}], "tool_call_id is {}"),
        (
            [{"role": "user", "content": [PARTS[0] | {"prompt_cache_breakpoint": 1}]}],
            "has .prompt_cache_breakpoint. in its text part at position 0",
        ),
        ([{"role": "user", "content": "hi", "name": nested(65)}], "more than 64 levels deep"),
    ],
)
def test_invalid_messages_are_refused_with_the_reason(messages: Any, words: str) -> None:
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


@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
def test_a_content_that_is_null_is_an_empty_text(role: str) -> None:
    assert check_messages([{"role": role, "content": None}]) == [{"role": role, "content": ""}]


def test_an_assistant_may_have_thought_and_said_nothing() -> None:
    """Clients that write out no nulls send no content at all."""
    (checked,) = check_messages([{"role": "assistant", "reasoning": "hm"}])
    assert (checked["content"], checked["reasoning_content"]) == ("", "hm")


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


def test_text_parts_of_a_tool_result_are_joined() -> None:
    result = {"role": "tool", "tool_call_id": "1", "content": PARTS}
    assert check_messages([result])[0]["content"] == "a\nb"


@pytest.mark.parametrize(
    ("kind", "name"),
    [("image_url", "image"), ("input_file", "file"), ("input_audio", "audio"), ("document",) * 2],
)
def test_other_parts_of_a_tool_result_leave_a_line(kind: str, name: str) -> None:
    left_out: dict[str, None] = {}
    parts = [PARTS[0], {"type": kind, kind: {"url": "data:"}}]
    (checked,) = check_messages([{"role": "tool", "content": parts}], left_out)
    assert checked["content"] == f"a\n[{name} left out: only text can be read]"
    assert list(left_out) == [f"messages.content ({kind})"]


def never(name: str) -> bool:
    """A template that reads no further field."""
    return False


LABELS: dict[str, Any] = {
    "id": "msg_1",
    "opts": {"visible": False},
    "timestamp": 1767225600.5,
    "metadata": {"a": 1},
    "provider_specific_fields": {"refusal": "no"},
    "thinking_blocks": [{"type": "thinking", "thinking": "hm", "signature": "x"}],
    "reasoning_details": [{"type": "reasoning.text", "text": "hm"}],
    "createdAt": "2026-01-01",
    "parts": PARTS,  # the same again
    "call_id": "c",
    "tool_name": "f",
    "status": "completed",
    "0": 1,
    "-": 1,
}


@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
def test_labels_of_messages_are_left_out_by_name(role: str) -> None:
    left_out: dict[str, None] = {}
    message = {"role": role, "content": "hi", "tool_call_id": "1", "name": "n"}
    checked = check_messages([message | LABELS, message | LABELS], left_out)
    assert without_labels(checked, never, left_out) == [message, message]
    assert list(left_out) == [f"messages.{name}" for name in LABELS]


def test_a_field_that_the_template_reads_stays() -> None:
    left_out: dict[str, None] = {}
    message = {"role": "user", "content": "hi", "thinking_blocks": [1], "id": 3}
    kept = without_labels([message], "thinking_blocks".__eq__, left_out)
    assert kept == [{"role": "user", "content": "hi", "thinking_blocks": [1]}]
    assert list(left_out) == ["messages.id"]


def test_labels_of_text_parts_are_left_out_by_name() -> None:
    left_out: dict[str, None] = {}
    labelled = [part | {"annotations": [1], "id": "p", "thought": None} for part in PARTS]
    (checked,) = check_messages([{"role": "user", "content": labelled}], left_out)
    assert checked["content"] == PARTS
    assert list(left_out) == ["messages.content.annotations", "messages.content.id"]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"role": "assistant", "content": "a", "prefix": True}, "set continue_final_message"),
        ({"role": "user", "content": "a", "documents": [{"text": "b"}]}, "put their text into"),
        ({"role": "assistant", "content": None, "parts": PARTS}, "put the parts of a message"),
        ({"role": "assistant", "content": "a", "tool_call": [CALL]}, "did you mean tool_calls"),
        ({"role": "user", "content": "", "contents": "a"}, "did you mean content"),
        ({"role": "tool", "content": "a", "call_id": "1"}, "did you mean tool_call_id"),
    ],
)
def test_a_field_that_would_change_the_answer_is_refused(
    fields: dict[str, Any], words: str
) -> None:
    checked = check_messages([fields], {})
    with pytest.raises(InvalidRequestError, match=words):
        without_labels(checked, never, {})


def test_labels_are_refused_without_a_list_for_ignored_fields() -> None:
    with pytest.raises(InvalidRequestError, match="'id', which the model's chat template does not"):
        without_labels([HI | {"id": 1}], never, None)


def test_labels_have_a_bound() -> None:
    many = [HI | {f"label{at}-{n}": 1 for n in range(50)} for at in range(3)]
    with pytest.raises(InvalidRequestError, match="more than 100 different fields"):
        without_labels(many, never, {})


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


@pytest.mark.parametrize(
    ("role", "meant"),
    [
        ("usr", "user"),
        ("User", "user"),
        ("sytem", "system"),
        ("human", "user"),
        ("AI", "assistant"),
    ],
)
def test_a_misspelt_role_is_refused_unless_the_template_has_it(role: str, meant: str) -> None:
    messages = [{"role": "system", "content": "a"}, {"role": role, "content": "b"}]
    with pytest.raises(InvalidRequestError) as caught:
        check_roles(messages, lambda name: False)
    assert str(caught.value) == f"messages[1] has the role {role!r}; did you mean {meant}?"
    assert caught.value.param == "messages"
    check_roles(messages, lambda name: name == role)


@pytest.mark.parametrize("role", ["user", "developer", "function", "tool", "narrator", "ipython"])
def test_other_roles_are_left_to_the_template(role: str) -> None:
    check_roles([{"role": role, "content": "a"}], lambda name: False)
