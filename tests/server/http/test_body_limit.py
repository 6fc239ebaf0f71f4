"""A body that is too long or too slow is refused; what is within the bounds passes untouched."""

import asyncio

import pytest
from starlette.exceptions import HTTPException
from tests.server.asgi import JSON, call, parts_of

from quire.errors import BodyTooLongError, RequestTimeoutError
from quire.server.http import body_limit as body_limit_module
from quire.server.http.body_limit import BodyLimit


class Reader:
    """Reads the whole body, as the routes do; `error` is what that raised."""

    def __init__(self):
        self.body = b""
        self.error = None

    async def __call__(self, scope, receive, send):
        try:
            while True:
                message = await receive()
                self.body += message.get("body", b"")
                if not message.get("more_body"):
                    break
        except HTTPException as error:
            self.error = error
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})


def length(num_bytes):
    return (b"content-length", str(num_bytes).encode())


def test_a_body_announced_too_long_is_refused_before_it_is_read():
    reader = Reader()
    answer = call(BodyLimit(reader, 1000), "/", headers=[JSON, length(1001)])
    assert (answer.status, answer.num_received) == (413, 0)
    assert (answer.error["code"], answer.error["type"]) == (
        "body_too_long",
        "invalid_request_error",
    )
    assert "longer than 1000 bytes" in answer.error["message"]
    assert reader.body == b"" and reader.error is None


@pytest.mark.parametrize("pieces", [1, 7])
@pytest.mark.parametrize("headers", [[JSON], [JSON, (b"content-length", b"nonsense")]])
def test_a_body_in_chunks_is_refused_as_soon_as_it_is_too_long(pieces, headers):
    reader = Reader()
    messages = parts_of(b"x" * 2000, pieces)
    answer = call(BodyLimit(reader, 1000), "/", headers=headers, messages=messages)
    assert reader.error.status_code == 413
    assert isinstance(reader.error.__cause__, BodyTooLongError)
    assert answer.num_received == (1 if pieces == 1 else 4)


@pytest.mark.parametrize("pieces", [1, 7])
def test_a_body_within_the_bounds_passes(pieces):
    reader, body = Reader(), bytes(range(250)) * 4
    call(BodyLimit(reader, 1000), "/", headers=[length(1000)], messages=parts_of(body, pieces))
    assert (reader.body, reader.error) == (body, None)


def test_a_body_that_does_not_come_is_given_up():
    reader = Reader()
    messages = [{"type": "http.request", "body": b"x" * 10, "more_body": True}]
    call(BodyLimit(reader, 1000, timeout_s=0.05), "/", messages=messages)
    assert reader.error.status_code == 408
    assert isinstance(reader.error.__cause__, RequestTimeoutError)
    assert "only 10 bytes of the body have come" in str(reader.error.__cause__)


def test_a_long_body_has_as_long_as_its_length_needs(monkeypatch):
    """timeout_s plus a second for each so many bytes: a first piece buys time for the next."""
    monkeypatch.setattr(body_limit_module, "MIN_BYTES_PER_S", 10)

    async def read(first):
        pieces = [{"type": "http.request", "body": first, "more_body": True}]

        async def receive():
            if pieces:
                return pieces.pop(0)
            await asyncio.sleep(0.2)
            return {"type": "http.request", "body": b"y", "more_body": False}

        async def send(message):
            pass

        reader = Reader()
        await BodyLimit(reader, 1000, timeout_s=0.05)(
            {"type": "http", "headers": []}, receive, send
        )
        return reader

    assert asyncio.run(read(b"x")).error is not None  # 0.05 s + 0.1 s
    assert asyncio.run(read(b"x" * 100)).error is None


def test_once_the_body_is_whole_nothing_is_timed():
    """A handler then waits for the client to leave, for as long as its answer takes."""
    seen = []

    async def inner(scope, receive, send):
        seen.append(await receive())
        seen.append(await receive())

    async def run():
        messages = [*parts_of(b"{}", 1), {"type": "http.disconnect"}]

        async def receive():
            if len(messages) == 1:
                await asyncio.sleep(0.15)
            return messages.pop(0)

        await BodyLimit(inner, 1000, timeout_s=0.05)({"type": "http", "headers": []}, receive, None)

    asyncio.run(run())
    assert [message["type"] for message in seen] == ["http.request", "http.disconnect"]


def test_other_kinds_of_connection_pass():
    seen = []

    async def inner(scope, receive, send):
        seen.append(await receive())

    async def receive():
        return {"type": "lifespan.startup"}

    asyncio.run(BodyLimit(inner)({"type": "lifespan"}, receive, None))
    assert seen == [{"type": "lifespan.startup"}]
