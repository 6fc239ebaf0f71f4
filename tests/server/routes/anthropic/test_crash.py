"""kill -9 of the engine in the middle of streamed messages: the client sees nothing of it."""

import asyncio
import json
import os
import signal

import httpx
from tests.server.launching import WAIT_S, launched

OPTIONS = {"num_blocks": 256, "max_num_seqs": 8, "max_model_len": 512}
NUMBERS = {"type": "array", "items": {"enum": [1, 22, 333]}, "minItems": 40, "maxItems": 40}
SCHEMA = {"type": "object", "properties": {"n": NUMBERS}, "required": ["n"]}
TOOLS = [{"name": "count", "input_schema": SCHEMA}]
QUESTION = [{"role": "user", "content": "What does os.path.join do?"}]
BODY = {"messages": QUESTION, "max_tokens": 100, "temperature": 1.0, "stream": True}
BODIES = [
    BODY | {"seed": 3, "stop_sequences": ["xyzzy"]},
    BODY | {"seed": 4, "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
    BODY | {"seed": 5, "tools": TOOLS, "tool_choice": {"type": "any"}},
]


async def ask(client, body, seen):
    """The text or arguments, and why it ended with which usage; `seen` counts the pieces."""
    text, end = "", None
    async with client.stream("POST", "/v1/messages", json=body) as answer:
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            data = json.loads(line[6:]) if line.startswith("data: ") else {}
            assert data.get("type") != "error", data
            if data.get("type") == "content_block_delta":
                text += data["delta"].get("text") or data["delta"]["partial_json"]
                seen.append(body["seed"])
            if data.get("type") == "message_delta":
                end = (data["delta"]["stop_reason"], data["usage"]["output_tokens"])
    return text, end


async def ask_all(server, kill_after=None):
    seen = []
    async with httpx.AsyncClient(base_url=server.url, timeout=WAIT_S) as client:
        asked = asyncio.gather(*(ask(client, body, seen) for body in BODIES))
        if kill_after is not None:
            while len(seen) < kill_after:
                await asyncio.sleep(0.001)
            os.kill(server.current_engine().pid, signal.SIGKILL)
        return await asked


def test_messages_outlive_the_engine():
    with launched(OPTIONS) as server:
        expected = asyncio.run(ask_all(server))
        assert asyncio.run(ask_all(server, kill_after=12)) == expected
        assert server.http.get("/health").json()["num_restarts"] == 1
        assert expected[1][0].lstrip().startswith("{") and expected[1][1][1] > 40
        assert expected[2][0].lstrip().startswith('{"n') and expected[2][1][1] > 40
