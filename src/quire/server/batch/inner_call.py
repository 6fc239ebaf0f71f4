"""Calls the HTTP application within the process, without a socket.

The application makes the same checks and gives the same answers as over HTTP.
"""

import asyncio
from dataclasses import dataclass, field

from starlette.types import ASGIApp, Message, Scope


@dataclass(slots=True)
class InnerAnswer:
    """The application's answer to one call."""

    status: int = 500
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""


async def post(app: ASGIApp, path: str, body: bytes) -> InnerAnswer:
    """Call the application; returns the complete answer. Exceptions that the application does not
    handle are raised here."""
    answer = InnerAnswer()
    pieces: list[bytes] = []
    is_sent = False

    async def receive() -> Message:
        nonlocal is_sent
        if is_sent:
            await asyncio.Event().wait()  # the caller never disconnects
        is_sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            answer.status = message["status"]
            answer.headers = {
                name.decode("latin-1").lower(): value.decode("latin-1")
                for name, value in message["headers"]
            }
        else:
            pieces.append(message.get("body", b""))

    await app(_scope(path, len(body)), receive, send)
    answer.body = b"".join(pieces)
    return answer


def _scope(path: str, num_bytes: int) -> Scope:
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [
            (b"host", b"localhost"),
            (b"content-type", b"application/json"),
            (b"content-length", str(num_bytes).encode()),
        ],
        "client": None,
        "server": None,
        "state": {},
    }
