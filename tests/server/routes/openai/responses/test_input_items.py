"""Items become the messages that a chat template writes as the model has."""

import pytest

from quire.errors import InvalidRequestError
from quire.server.routes.openai.responses.input_items import messages_of

USER = {"role": "user", "content": "hello"}
CALL = {"type": "function_call", "id": "fc_1", "call_id": "c1", "name": "f", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "done"}
THOUGHT = {
    "type": "reasoning",
    "id": "rs_1",
    "summary": [],
    "content": [{"type": "reasoning_text", "text": "hm"}],
}
SAID = {
    "type": "message",
    "id": "msg_1",
    "role": "assistant",
    "status": "completed",
    "content": [
        {"type": "output_text", "text": "one", "annotations": [], "logprobs": []},
        {"type": "refusal", "refusal": " two"},
    ],
}


def called(name="f", arguments="{}", call_id="c1"):
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def read(*items, instructions=None):
    return messages_of(instructions, [], items)


def test_items_of_one_assistant_turn_become_one_message():
    assert read(USER, THOUGHT, SAID, CALL, CALL | {"call_id": "c2"}, OUTPUT, SAID) == [
        USER,
        {
            "role": "assistant",
            "content": "one two",
            "reasoning_content": "hm",
            "tool_calls": [called(), called(call_id="c2")],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "done"},
        {"role": "assistant", "content": "one two"},
    ]


def test_an_item_outside_the_turn_begins_another_message():
    roles = [(each["role"], each["content"]) for each in read(SAID, SAID, CALL, SAID, THOUGHT)]
    assert roles == [("assistant", "one two")] * 3 + [("assistant", "")]


def test_reasoning_that_can_not_be_read_is_left_out():
    empty = {"type": "reasoning", "id": "rs", "summary": [], "encrypted_content": "xyz"}
    assert read(empty, CALL) == [{"role": "assistant", "content": "", "tool_calls": [called()]}]
    summary = empty | {"summary": [{"type": "summary_text", "text": "short"}]}
    assert read(summary)[0]["reasoning_content"] == "short"


def test_parts_stay_parts_but_for_one_alone():
    parts = [{"type": "input_text", "text": text} for text in "ab"]
    one, both = read({"role": "user", "content": parts[:1]}, {"role": "user", "content": parts})
    assert one["content"] == "a"
    assert both["content"] == [{"type": "text", "text": text} for text in "ab"]
    assert read(OUTPUT | {"output": parts})[0]["content"] == "a\nb"


def test_calls_are_named_as_the_model_knows_the_tools():
    custom = {"type": "custom_tool_call", "call_id": "c", "name": "patch", "input": 'a "b"\n'}
    (message,) = read(CALL | {"namespace": "agents"}, custom)
    names = [call["function"]["name"] for call in message["tool_calls"]]
    assert names == ["agents__f", "patch"]
    assert message["tool_calls"][1]["function"]["arguments"] == '{"input":"a \\"b\\"\\n"}'
    answer = {"type": "custom_tool_call_output", "call_id": "c", "output": "ok"}
    assert read(answer) == [{"role": "tool", "tool_call_id": "c", "content": "ok"}]


def test_instructions_at_the_head_are_one_message():
    developer = {"role": "developer", "content": [{"type": "input_text", "text": "b"}]}
    assert read(developer, USER, developer, instructions="a") == [
        {"role": "system", "content": "a\n\nb"},
        USER,
        {"role": "developer", "content": "b"},
    ]
    assert read(developer) == [{"role": "developer", "content": "b"}]


def test_a_history_comes_before_the_input():
    assert messages_of("be kind", [USER, SAID], [USER]) == [
        {"role": "system", "content": "be kind"},
        USER,
        {"role": "assistant", "content": "one two"},
        USER,
    ]


@pytest.mark.parametrize(
    ("item", "said"),
    [
        ("text", "input[1] is 'text'"),
        ({"role": "robot", "content": "a"}, "input[1].role is 'robot'"),
        ({"role": "user"}, "input[1].content is None"),
        (USER | {"id": ["a"]}, "input[1].id is ['a']"),
        ({"role": "user", "content": [{"type": "input_image"}]}, "part of type 'input_image'"),
        ({"role": "user", "content": ["a"]}, "input[1].content[0] is a part of type 'str'"),
        ({"role": "user", "content": [{"type": "input_text"}]}, "input[1].content[0].text is None"),
        (CALL | {"arguments": {}}, "input[1].arguments is {}"),
        (CALL | {"name": None}, "input[1].name is None"),
        (CALL | {"call_id": 4}, "input[1].call_id is 4"),
        (OUTPUT | {"output": 5}, "input[1].output is 5"),
        ({"type": "web_search_call", "id": "w"}, "input[1] has the type 'web_search_call'"),
        ({"type": ["message"]}, "input[1] has the type ['message']"),
        ({"id": "msg_9"}, "refers to 'msg_9', which is not stored here"),
        ({"type": "item_reference", "id": "a"}, "refers to 'a', which is not stored here"),
    ],
)
def test_an_item_that_is_not_understood_is_named(item, said):
    with pytest.raises(InvalidRequestError) as caught:
        read(USER, item)
    assert said in str(caught.value) and caught.value.param == "input"


def test_an_image_that_a_tool_answers_with_leaves_a_line():
    left_out = {}
    image = {"type": "input_image", "image_url": "data:image/png;base64,aGk="}
    parts = [{"type": "input_text", "text": "done"}, image]
    (message,) = messages_of(None, [], [OUTPUT | {"output": parts}], left_out)
    assert message["content"] == "done\n[image left out: only text can be read]"
    assert list(left_out) == ["input.output (input_image)"]


def test_a_content_that_is_null_is_an_empty_text():
    assert read(USER | {"content": None}, OUTPUT | {"output": None}) == [
        {"role": "user", "content": ""},
        {"role": "tool", "tool_call_id": "c1", "content": ""},
    ]
