"""kill -9 of the engine in the middle of streamed Responses: the very items come."""

import asyncio
import os
import signal

import httpx
from tests.server.launching import WAIT_S, launched
from tests.server.responding import items_of, read_events

OPTIONS = {"num_blocks": 256, "max_num_seqs": 8, "max_model_len": 512}
PATH = "/v1/responses"
SCHEMA = {
    "type": "object",
    "properties": {"words": {"type": "array", "items": {"enum": ["red", "green"]}, "minItems": 40}},
    "required": ["words"],
}
TOOL = {"type": "function", "name": "paint", "parameters": SCHEMA, "strict": True}
COMMON = {"input": "colors?", "stream": True, "max_output_tokens": 120, "temperature": 1, "seed": 3}
CALLS = [
    COMMON | {"ignore_eos": True},
    COMMON | {"text": {"format": {"type": "json_schema", "name": "c", "schema": SCHEMA}}},
    COMMON | {"tools": [TOOL], "tool_choice": {"type": "function", "name": "paint"}},
]


async def ask_all(server, kill_at=None):
    """The events of all calls, streamed at once; the engine is killed after so many pieces."""
    num_pieces = 0

    async def ask(client, body):
        nonlocal num_pieces
        pieces = []
        async with client.stream("POST", PATH, json=body) as answer:
            async for piece in answer.aiter_text():
                pieces.append(piece)
                num_pieces += 1
                if num_pieces == kill_at:
                    os.kill(server.current_engine().pid, signal.SIGKILL)
        return read_events("".join(pieces))

    async with httpx.AsyncClient(base_url=server.url, timeout=WAIT_S) as client:
        return await asyncio.gather(*[ask(client, body) for body in CALLS])


def told(events):
    """What the client got, without ids: which are new each time, and the same within a stream."""
    fresh = ("id", "call_id")
    return [
        {name: value for name, value in item.items() if name not in fresh}
        for item in items_of(events)
    ] + [events[-1]["type"]]


def test_streams_outlive_the_engine_to_the_bit():
    with launched(OPTIONS, keep_alive_s=0.1) as server:
        expected = [told(events) for events in asyncio.run(ask_all(server))]
        killed = [told(events) for events in asyncio.run(ask_all(server, kill_at=30))]
        assert server.http.get("/health").json()["num_restarts"] == 1
    assert killed == expected
    assert [item[0]["type"] for item in expected[:2]] == ["message", "message"]
