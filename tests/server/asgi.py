"""Calls an ASGI application in this process: for what stands around the routes."""

import asyncio
import contextlib
import json
from dataclasses import dataclass, field

import pytest

HOST = (b"host", b"here")
JSON = (b"content-type", b"application/json")


@dataclass
class Answer:
    """What an application sent; `num_received`: messages that it has asked for."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    content: bytes = b""
    num_received: int = 0
    state: dict = field(default_factory=dict)

    def json(self):
        return json.loads(self.content)

    @property
    def error(self):
        return self.json()["error"]


def parts_of(body, pieces):
    """The messages that bring a body in so many pieces."""
    size = -(-len(body) // pieces) or 1
    parts = [body[at : at + size] for at in range(0, len(body), size)] or [b""]
    return [
        {"type": "http.request", "body": part, "more_body": at + 1 < len(parts)}
        for at, part in enumerate(parts)
    ]


def call(
    app,
    path,
    body=b"",
    *,
    method="POST",
    headers=(JSON,),
    messages=None,
    raised=None,
    host=HOST,
):
    """The answer to one call.

    messages: that bring the body, if not it in one piece; after the last one nothing ever comes.
    raised: what the application raises besides, for the server's log.
    """
    pending = parts_of(body, 1) if messages is None else list(messages)
    answer = Answer()

    async def receive():
        answer.num_received += 1
        if not pending:
            await asyncio.Event().wait()
        return pending.pop(0)

    async def send(message):
        if message["type"] == "http.response.start":
            answer.status = message["status"]
            answer.headers = {k.decode().lower(): v.decode() for k, v in message["headers"]}
        answer.content += message.get("body", b"")

    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [host, *headers],
        "state": answer.state,
    }
    with pytest.raises(raised) if raised else contextlib.nullcontext():
        asyncio.run(asyncio.wait_for(app(scope, receive, send), 30))
    return answer
