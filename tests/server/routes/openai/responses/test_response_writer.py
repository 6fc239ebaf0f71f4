"""Events of the model's message become items, and OpenAI's events in OpenAI's order."""

from itertools import count

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.server.responding import Items, stream_event

from quire.server.routes.openai.responses.response_writer import ResponseWriter
from quire.server.routes.openai.responses.tool_definitions import read_tools
from quire.text.parsers.message_events import (
    CallArguments,
    CallEnd,
    CallStart,
    ReasoningPiece,
)

_, NAMES = read_tools(
    [
        {"type": "function", "name": "f"},
        {"type": "custom", "name": "patch"},
        {"type": "namespace", "name": "agents", "tools": [{"type": "function", "name": "spawn"}]},
    ]
)


def writer():
    numbers = count()
    return ResponseWriter(NAMES, lambda prefix: f"{prefix}_{next(numbers)}")


def write(*pushed, is_complete=True):
    """The writer, and its events as JSON, each checked by OpenAI's package."""
    made = writer()
    events = [event for each in pushed for event in made.push(each)]
    events += made.finish(is_complete=is_complete)
    found = msgspec.to_builtins(events)
    for event in found:
        stream_event().validate_python(event)
    return made, found


def kinds(events):
    return [event["type"].removeprefix("response.") for event in events]


def test_a_text_is_a_message():
    made, events = write("Hel", "lo")
    assert kinds(events) == [
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
    ]
    assert [event["sequence_number"] for event in events] == list(range(7))
    assert msgspec.to_builtins(made.items) == [events[-1]["item"]]
    assert events[-1]["item"]["content"][0]["text"] == "Hello"
    assert events[-1]["item"]["status"] == "completed"


def test_reasoning_is_an_item_of_its_own():
    _, events = write(ReasoningPiece("hm"), "yes", ReasoningPiece("but"))
    assert kinds(events)[:6] == [
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
    ]
    items = [event["item"] for event in events if event["type"].endswith("item.done")]
    assert [item["type"] for item in items] == ["reasoning", "message", "reasoning"]
    assert items[0]["content"] == [{"type": "reasoning_text", "text": "hm"}]
    assert items[0]["summary"] == [] and items[0]["encrypted_content"] is None


def test_a_call_opens_and_closes():
    start = CallStart(0, "agents__spawn", "call_7")
    _, events = write("I'll", start, CallArguments(0, '{"a":'), CallArguments(0, "1}"), CallEnd(0))
    assert kinds(events)[-5:] == [
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
    ]
    item = events[-1]["item"]
    assert (item["name"], item["namespace"], item["call_id"]) == ("spawn", "agents", "call_7")
    assert (item["arguments"], item["status"]) == ('{"a":1}', "completed")
    assert events[-5]["item"] | {"arguments": '{"a":1}', "status": "completed"} == item


def test_a_custom_tool_gets_its_text():
    pieces = ['{"in', 'put": "a\\', 'n\\"', '"}']
    arguments = [CallArguments(0, piece) for piece in pieces]
    _, events = write(CallStart(0, "patch", "c"), *arguments, CallEnd(0))
    assert kinds(events) == [
        "output_item.added",
        "custom_tool_call_input.delta",
        "custom_tool_call_input.delta",
        "custom_tool_call_input.done",
        "output_item.done",
    ]
    assert events[-2]["input"] == events[-1]["item"]["input"] == 'a\n"'


def test_calls_without_arguments_follow_each_other():
    made, events = write(CallStart(0, "f", "a"), CallEnd(0), CallStart(1, "g", "b"), CallEnd(1))
    assert (
        kinds(events)
        == ["output_item.added", "function_call_arguments.done", "output_item.done"] * 2
    )
    assert [(item.name, item.call_id, item.arguments) for item in made.items] == [
        ("f", "a", ""),
        ("g", "b", ""),
    ]


@pytest.mark.parametrize("is_complete", [False, True])
def test_a_call_that_was_cut_off_is_never_complete(is_complete):
    made, events = write(CallStart(0, "f", "a"), CallArguments(0, '{"x'), is_complete=is_complete)
    assert kinds(events)[2:3] == ["output_item.done"] and made.items[0].status == "incomplete"


def test_an_answer_has_a_message_or_a_call_unless_it_was_cut_short():
    made, events = write(ReasoningPiece("hm"))
    assert [type(item).__name__ for item in made.items] == ["ReasoningItem", "OutputMessage"]
    assert made.items[1].content[0].text == "" and kinds(events)[-1] == "output_item.done"
    assert len(write()[0].items) == 1
    assert write(is_complete=False)[0].items == []
    assert write(ReasoningPiece("hm"), is_complete=False)[0].items[-1].status == "incomplete"


def test_logprobs_go_with_their_text():
    made = writer()
    events = list(made.push("a", b'{"token":"a"}'))
    events += made.push("bc", b'{"token":"b"},{"token":"c"}')
    events += made.finish(is_complete=True)
    found = msgspec.json.decode(msgspec.json.encode(events))
    assert [event.get("logprobs") for event in found[2:5]] == [
        [{"token": "a"}],
        [{"token": "b"}, {"token": "c"}],
        [{"token": "a"}, {"token": "b"}, {"token": "c"}],
    ]
    assert found[5]["part"]["logprobs"] == found[6]["item"]["content"][0]["logprobs"]


CALLS = st.tuples(
    st.sampled_from(["f", "agents__spawn", "unknown"]), st.lists(st.text(min_size=1)), st.booleans()
)
PIECES = st.text(min_size=1) | st.builds(ReasoningPiece, st.text(min_size=1))


@given(st.lists(PIECES | CALLS, max_size=8), st.booleans())
def test_the_events_of_any_message_add_up_to_its_items(parts, is_complete):
    pushed = []
    for index, part in enumerate(parts):
        if not isinstance(part, tuple):
            pushed.append(part)
            continue
        name, pieces, is_ended = part
        pushed += [CallStart(index, name, f"call_{index}")]
        pushed += [CallArguments(index, piece) for piece in pieces]
        pushed += [CallEnd(index)] if is_ended else []
    made = writer()
    events = [event for each in pushed for event in made.push(each)]
    events += made.finish(is_complete=is_complete)
    items = Items()
    for event in msgspec.json.decode(msgspec.json.encode(events)):
        items.take(event)
    assert items.open is None and items.done == msgspec.to_builtins(made.items)
    assert len({item.id for item in made.items}) == len(made.items)
