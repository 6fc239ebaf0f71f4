"""The application's frame: what is served where, and how much it takes in."""

import asyncio
import contextlib
import json

import pytest

from quire.server import app as app_module
from quire.server.app import BodyLimit, create_app


def call(app, path, body=b"", method="POST", pieces=1, raised=None):
    """(status, JSON) of one call, with the body in so many pieces.

    raised: what the application raises besides, for the server's log.
    """
    size = -(-len(body) // pieces) or 1
    parts = [body[at : at + size] for at in range(0, len(body), size)] or [b""]
    sent = []

    async def receive():
        part = parts.pop(0)
        return {"type": "http.request", "body": part, "more_body": bool(parts)}

    async def send(message):
        sent.append(message)

    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
        "app": app,
    }
    with pytest.raises(raised) if raised else contextlib.nullcontext():
        asyncio.run(app(scope, receive, send))
    content = b"".join(message.get("body", b"") for message in sent)
    return sent[0]["status"], json.loads(content)


def test_the_paths_are_openais():
    paths = set(create_app(None).openapi()["paths"])
    assert paths == {
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/models",
        "/v1/models/{name}",
        "/health",
        "/memory",
        "/memory/blocks",
    }


@pytest.mark.parametrize("pieces", [1, 7])
def test_a_body_beyond_the_bound_is_refused_as_it_comes(monkeypatch, pieces):
    monkeypatch.setattr(app_module, "MAX_BODY_BYTES", 1000)
    body = json.dumps({"prompt": "x" * 2000}).encode()
    status, answer = call(create_app(None), "/v1/completions", body, pieces=pieces)
    assert status == 413
    assert "longer than 1000 bytes" in answer["error"]["message"]


def test_a_bug_is_told_without_its_insides():
    app = create_app(None)  # no service: every call fails inside
    status, answer = call(app, "/v1/models", method="GET", raised=AttributeError)
    assert status == 500
    assert answer["error"]["type"] == "server_error"
    assert "AttributeError" in answer["error"]["message"]
    assert "NoneType" not in answer["error"]["message"]


def test_other_kinds_of_connection_pass_through_the_limit():
    seen = []

    async def inner(scope, receive, send):
        seen.append(await receive())

    async def receive():
        return {"type": "lifespan.startup"}

    asyncio.run(BodyLimit(inner)({"type": "lifespan"}, receive, None))
    assert seen == [{"type": "lifespan.startup"}]
