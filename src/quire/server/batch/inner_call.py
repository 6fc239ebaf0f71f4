"""Calls the HTTP application within the process, without a socket.

The application makes the same checks and gives the same answers as over HTTP.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

from starlette.types import ASGIApp, Message, Scope


@dataclass(slots=True)
class InnerAnswer:
    """The application's answer to one call."""

    status: int = 500
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""


async def post(
    app: ASGIApp,
    path: str,
    body: bytes,
    state: Mapping[str, object] | None = None,
    headers: Mapping[str, str] | None = None,
) -> InnerAnswer:
    """Call the application; returns the complete answer. `state` is the call's state at its
    beginning, `headers` are further headers. Exceptions that the application does not handle are
    raised here."""
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

    scope = _scope(path, len(body))
    scope["state"] |= state or {}
    scope["headers"] += [
        (name.encode("latin-1"), value.encode("latin-1")) for name, value in (headers or {}).items()
    ]
    await app(scope, receive, send)
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
