"""Reads the events of a streamed response as OpenAI's package does, and checks their order."""

import json
from functools import cache

from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

LAST = ("response.completed", "response.incomplete", "response.failed")


@cache
def stream_event():
    return TypeAdapter(ResponseStreamEvent)


def read_events(body):
    """The events of a body of server-sent events, each as JSON, checked one by one."""
    events = []
    for block in body.strip().split("\n\n"):
        lines = [line for line in block.split("\n") if not line.startswith(":")]
        if not lines:
            continue
        name, data = lines
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        stream_event().validate_python(event)
        events.append(event)
    return events


def check_whole(response):
    """An answer is what OpenAI's package takes it for."""
    return Response.model_validate(response)


class Items:
    """What the events so far say of the items, one open at a time.

    Invariant: `done` are those that have ended, in order; `open` is the one that has not.
    """

    def __init__(self):
        self.done, self.open, self.part, self.text = [], None, None, ""

    def take(self, event):
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert self.open is None and event["item"]["status"] == "in_progress"
            self.open, self.text, self.part = event["item"], "", None
            assert event["output_index"] == len(self.done)
            return
        assert event["output_index"] == len(self.done), "one item at a time"
        item_id = event["item"]["id"] if "item" in event else event["item_id"]
        assert item_id == self.open["id"]
        getattr(self, f"_{kind.replace('.', '_')}", self._piece)(event)

    def _content_part_added(self, event):
        assert self.part is None and event["content_index"] == 0 and event["part"]["text"] == ""
        self.part = event["part"]

    def _content_part_done(self, event):
        assert event["part"]["type"] == self.part["type"] and event["part"]["text"] == self.text
        self.part = event["part"]

    def _output_item_done(self, event):
        item = event["item"]
        if item["type"] in ("message", "reasoning"):
            assert item["content"] == [self.part] and item["status"] in ("completed", "incomplete")
        else:
            assert (item["arguments"] if item["type"] == "function_call" else item["input"]) == (
                self.text
            )
            assert item["call_id"] == self.open["call_id"]
        self.done.append(item)
        self.open = None

    def _piece(self, event):
        if event["type"].endswith(".delta"):
            self.text += event["delta"]
            return
        (whole,) = (event[name] for name in ("text", "arguments", "input") if name in event)
        assert whole == self.text


def items_of(events):
    """The items that a stream's events between the first two and the last build up; the last event
    has them all again."""
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1]["type"] in LAST
    assert len({event["response"]["id"] for event in (*events[:2], events[-1])}) == 1
    items = Items()
    for event in events[2:-1]:
        items.take(event)
    assert items.open is None and events[-1]["response"]["output"] == items.done
    return items.done
