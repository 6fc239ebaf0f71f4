"""Messages, Responses, embeddings and scores: calls, and what a client keeps of their answers."""

import json
import uuid

from tests.server.responding import items_of, read_events

QUESTION = [{"role": "user", "content": "What does os.path.join do?"}]
NUMBERS = {"type": "array", "items": {"enum": [1, 22, 333]}, "minItems": 30, "maxItems": 30}
SCHEMA = {
    "type": "object",
    "properties": {"n": NUMBERS},
    "required": ["n"],
    "additionalProperties": False,
}
TALK = {"messages": QUESTION, "max_tokens": 90, "temperature": 1.0, "stream": True}
MESSAGES = [
    TALK | {"seed": 3, "stop_sequences": ["xyzzy"]},
    TALK | {"seed": 4, "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
    TALK
    | {
        "seed": 5,
        "tools": [{"name": "count", "input_schema": SCHEMA}],
        "tool_choice": {"type": "any"},
    },
]
ASK = {"input": "count", "stream": True, "max_output_tokens": 90, "temperature": 1, "seed": 3}
TOOL = {"type": "function", "name": "count", "parameters": SCHEMA, "strict": True}
RESPONSES = [
    ASK | {"ignore_eos": True},
    ASK | {"text": {"format": {"type": "json_schema", "name": "c", "schema": SCHEMA}}},
    ASK | {"tools": [TOOL], "tool_choice": {"type": "function", "name": "count"}},
]
LONG = "import os\n" * 30
POOLING = [
    ("/v1/embeddings", {"input": [f"x = {i}\n{LONG}" for i in range(8)]}),
    ("/rerank", {"query": "os", "documents": [f"{LONG}y = {i}" for i in range(8)]}),
]


def ask_others(client):
    """A coroutine for each call. Those that pool come first, so that they do not wait for a row."""
    return [
        *(_pooled(client, path, body) for path, body in POOLING),
        *(_message(client, body) for body in MESSAGES),
        *(_response(client, body) for body in RESPONSES),
    ]


def check_others(found):
    """The answers to all calls are what they are to be."""
    vectors, ranks, *rest = found
    assert len(vectors) == len(ranks) == 8
    said, in_form, called = rest[: len(MESSAGES)]
    assert said[1][0] in ("end_turn", "max_tokens")
    for text, end in (in_form, called):
        assert text.lstrip().startswith('{"n') and end[1] > 40
    kinds = [items[0]["type"] for *items, _ in rest[len(MESSAGES) :]]
    assert kinds == ["message", "message", "function_call"]


async def _pooled(client, path, body):
    salt = {"cache_salt": uuid.uuid4().hex}  # or the second time little would be computed
    answer = (await client.post(path, json=body | salt)).json()
    return answer["data" if path == "/v1/embeddings" else "results"]


async def _message(client, body):
    """The text or the arguments, and why it ended, with which usage."""
    text, end = "", None
    async with client.stream("POST", "/v1/messages", json=body) as answer:
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            data = json.loads(line[6:]) if line.startswith("data: ") else {}
            assert data.get("type") != "error", data
            if data.get("type") == "content_block_delta":
                text += data["delta"].get("text") or data["delta"].get("partial_json", "")
            if data.get("type") == "message_delta":
                end = (data["delta"]["stop_reason"], data["usage"]["output_tokens"])
    return text, end


async def _response(client, body):
    """The items without their ids, which are new each time, and the last event's type."""
    async with client.stream("POST", "/v1/responses", json=body) as answer:
        events = read_events((await answer.aread()).decode())
    fresh = ("id", "call_id")
    items = [
        {name: value for name, value in item.items() if name not in fresh}
        for item in items_of(events)
    ]
    return [*items, events[-1]["type"]]
