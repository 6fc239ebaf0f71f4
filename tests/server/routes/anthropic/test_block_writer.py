"""The events of a message, read by Anthropic's own package, are its whole blocks."""

import json

import pytest
from anthropic.lib.streaming._messages import accumulate_event
from anthropic.types import Message, RawMessageStreamEvent
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from quire.server.generation.collected_message import CallPart, CollectedMessage
from quire.server.routes.anthropic.block_writer import BlockWriter, input_of, whole_blocks
from quire.text.parsers.message_events import (
    CallArguments,
    CallEnd,
    CallStart,
    ReasoningPiece,
)

EVENT = TypeAdapter(RawMessageStreamEvent)
EMPTY = {
    "id": "msg_1",
    "type": "message",
    "role": "assistant",
    "model": "embedded",
    "content": [],
    "usage": {"input_tokens": 1, "output_tokens": 0},
}


def parsed(pieces):
    """The events, each of which names its own type."""
    found = []
    for event in b"".join(pieces).decode().split("\n\n")[:-1]:
        name, data = event.split("\n")
        found.append(EVENT.validate_json(data.removeprefix("data: ")))
        assert name == f"event: {found[-1].type}"
    return found


def joined(events):
    """What Anthropic's client makes of the events."""
    message = accumulate_event(
        event=EVENT.validate_python({"type": "message_start", "message": EMPTY}),
        current_snapshot=None,
        json_bufs={},
    )
    texts = {}
    for event in events:
        message = accumulate_event(event=event, current_snapshot=message, json_bufs=texts)
    return [block.model_dump(exclude={"parsed_output"}) for block in message.content]


def whole(events, **options):
    collected = CollectedMessage()
    for event in events:
        collected.push(event)
    content = json.loads(b"[" + b"".join(whole_blocks(collected.parts, **options)) + b"]")
    message = Message.model_validate(EMPTY | {"content": content})
    return [block.model_dump(exclude={"parsed_output"}) for block in message.content]


def streamed(events, **options):
    writer = BlockWriter(**options)
    return parsed([*writer.write(events), *writer.close()])


def test_a_text_is_one_block():
    events = streamed(["Hel", "lo"])
    assert [event.type for event in events] == [
        "content_block_start",
        "content_block_delta",
        "content_block_delta",
        "content_block_stop",
    ]
    assert joined(events) == whole(["Hello"])
    assert joined(events)[0]["text"] == "Hello"


def test_thinking_ends_with_its_signature():
    thought = [ReasoningPiece("Two "), ReasoningPiece("files."), "Both."]
    events = streamed(thought)
    deltas = [event.delta.type for event in events if event.type == "content_block_delta"]
    assert deltas == ["thinking_delta", "thinking_delta", "signature_delta", "text_delta"]
    found = joined(events)
    assert found == whole(thought) == whole([ReasoningPiece("Two files."), "Both."])
    assert (found[0]["thinking"], len(found[0]["signature"])) == ("Two files.", 64)


def test_thinking_may_be_kept_back():
    thought = [ReasoningPiece("Two files."), "Both."]
    found = joined(streamed(thought, shows_thinking=False))
    assert found == whole(thought, shows_thinking=False)
    assert found[0]["thinking"] == ""
    assert found[0]["signature"] == whole(thought)[0]["signature"]


def test_calls_are_blocks_of_their_own():
    events = [
        "I read.",
        CallStart(0, "read", "toolu_1"),
        CallArguments(0, '{"path": '),
        CallArguments(0, '"é"}'),
        CallEnd(0),
        CallStart(1, "list", "toolu_2"),
        CallEnd(1),
    ]
    text, *calls = joined(streamed(events))
    assert [text, *calls] == whole(events)
    assert [(call["id"], call["name"], call["input"]) for call in calls] == [
        ("toolu_1", "read", {"path": "é"}),
        ("toolu_2", "list", {}),
    ]
    assert [event.index for event in streamed(events)] == [0, 0, 0, 1, 1, 1, 1, 2, 2]


@pytest.mark.parametrize("length", range(1, 24))
def test_a_call_that_was_cut_off_has_what_came(length):
    events = [CallStart(0, "read", "toolu_1"), CallArguments(0, '{"path": [1, "ab"], "b'[:length])]
    assert joined(streamed(events)) == whole(events)


@pytest.mark.parametrize("text", ["[1]", '"a"', "{]", '{"a": ' + "[" * 500 + "]" * 500 + "}"])
def test_arguments_that_can_not_be_read_are_given_as_they_are(text):
    assert input_of(CallPart("toolu_1", "read", text, is_complete=True)) == {"arguments": text}


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
PARTS = st.lists(
    st.one_of(
        st.text(min_size=1),
        st.builds(ReasoningPiece, st.text(min_size=1)),
        st.dictionaries(st.text(), VALUES, max_size=3),
    ),
    max_size=6,
)


def pieces_of(parts, cuts):
    """The events of parts, each text cut at one of the places."""
    num_calls = 0
    for part in parts:
        if isinstance(part, dict):
            yield CallStart(num_calls, f"tool{num_calls}", f"toolu_{num_calls}")
            yield from cut(json.dumps(part), cuts, lambda t, n=num_calls: CallArguments(n, t))
            yield CallEnd(num_calls)
            num_calls += 1
        else:
            text = part if isinstance(part, str) else part.text
            yield from cut(text, cuts, type(part))


def cut(text, cuts, make):
    at = cuts[len(text) % len(cuts)] % (len(text) + 1)
    return [make(piece) for piece in (text[:at], text[at:]) if piece]


@given(PARTS, st.lists(st.integers(0, 100), min_size=1, max_size=5))
def test_streamed_is_whole_however_it_is_cut(parts, cuts):
    pieces = list(pieces_of(parts, cuts))
    assert joined(streamed(pieces)) == whole(pieces) == whole(list(pieces_of(parts, [0])))
