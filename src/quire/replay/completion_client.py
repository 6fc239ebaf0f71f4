"""A small HTTP client that streams completions and chats, and notes when tokens come.

It does little work per token, since it may run on the same cores as the server. It uses OpenAI's
API with vLLM's extra fields, and only Python's standard library.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from quire.errors import ConfigurationError

MAX_HEAD_BYTES = 1 << 16
#: The connection counts as broken after this many seconds without data.
SILENCE_S = 600.0


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """The address of a server."""

    host: str
    port: int
    is_tls: bool
    #: The prefix of all paths, without a slash at its end.
    base: str
    #: (name, value) of each header that every call sends.
    headers: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, url: str, api_key: str | None) -> ServerAddress:
        """The address in a URL. Raises ConfigurationError if `url` is not a server's URL."""
        parts = urlsplit(url)
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.scheme not in ("http", "https") or not parts.hostname or port == -1:
            raise ConfigurationError(
                f"the server's URL is {url!r:.200}, but must be like http://127.0.0.1:8000"
            )
        is_tls = parts.scheme == "https"
        headers = (("Authorization", f"Bearer {api_key}"),) if api_key else ()
        base = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, port or (443 if is_tls else 80), is_tls, base, headers)


@dataclass(slots=True)
class StreamedAnswer:
    """The part of a completion that was received."""

    #: The HTTP status.
    status: int
    #: The error code in the answer; None if there was no error.
    code: str | None = None
    #: Tokens of the first choice; empty if the server does not send token ids.
    token_ids: list[int] = field(default_factory=list)
    #: (seconds by `time.perf_counter`, number of tokens) of each event with tokens of the first
    #: choice.
    times_s: list[tuple[float, int]] = field(default_factory=list)
    usage: Mapping[str, Any] | None = None


async def get_json(address: ServerAddress, method: str, path: str, body: Any = None) -> Any:
    """The parsed JSON of a call's answer; None if the status is not 200 or the body is not JSON.

    Raises OSError if the connection fails, asyncio.IncompleteReadError if the answer breaks off,
    and ValueError if it is not HTTP.
    """
    async with _connection(address) as (reader, writer):
        writer.write(_request_bytes(address, method, path, body))
        status, headers = await _head(reader)
        raw = b"".join([piece async for piece in _pieces(reader, headers)])
    with suppress(ValueError):
        return json.loads(raw) if status == 200 else None
    return None


async def complete(
    address: ServerAddress,
    body: Mapping[str, Any],
    *,
    path: str = "/v1/completions",
    leave_after: int | None = None,
) -> StreamedAnswer:
    """Stream a completion to its end; or a chat, if `path` is that of the chat API.

    With `leave_after`, close the connection after this number of tokens.

    Raises OSError if the connection fails, asyncio.IncompleteReadError if the answer breaks off,
    and ValueError if the answer is malformed.
    """
    async with _connection(address) as (reader, writer):
        writer.write(_request_bytes(address, "POST", path, body))
        status, headers = await _head(reader)
        answer = StreamedAnswer(status)
        if status != 200:
            raw = b"".join([piece async for piece in _pieces(reader, headers)])
            answer.code = _error_code(raw)
            return answer
        num_tokens = 0
        async for data in _events(_pieces(reader, headers)):
            num_tokens += _add_event(answer, json.loads(data))
            if leave_after is not None and num_tokens >= leave_after:
                break
        return answer


def _add_event(answer: StreamedAnswer, event: Mapping[str, Any]) -> int:
    """Add an event to the answer; returns the number of the event's tokens of the first choice.

    Raises ValueError if the event does not have OpenAI's form.
    """
    try:
        return _taken(answer, event)
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"the server sent {event!r:.200}") from error


def _taken(answer: StreamedAnswer, event: Mapping[str, Any]) -> int:
    if error := event.get("error"):
        found = error if isinstance(error, dict) else {}
        answer.code = str(found.get("code") or found.get("type") or "error")
        return 0
    answer.usage = event.get("usage") or answer.usage
    num_tokens = 0
    for choice in event.get("choices", ()):
        if choice.get("index", 0) == 0:
            ids = choice.get("token_ids") or ()
            num_tokens += len(ids) or bool(choice.get("text") or _said(choice.get("delta") or {}))
            answer.token_ids += ids
    if num_tokens:
        answer.times_s.append((time.perf_counter(), num_tokens))
    return num_tokens


def _said(delta: Mapping[str, Any]) -> object:
    """The text in an event of a chat: reasoning or answer."""
    return delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning")


def _error_code(raw: bytes) -> str | None:
    try:
        found = json.loads(raw)["error"]
        return str(found.get("code") or found.get("type"))
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


@asynccontextmanager
async def _connection(
    address: ServerAddress,
) -> AsyncIterator[tuple[_LimitedReader, asyncio.StreamWriter]]:
    """Opens a connection and closes it at the end of the `with` block. Raises TimeoutError after
    SILENCE_S seconds without data."""
    context = ssl.create_default_context() if address.is_tls else None
    limit = asyncio.timeout(SILENCE_S)
    try:
        async with limit:
            reader, writer = await asyncio.open_connection(address.host, address.port, ssl=context)
            try:
                yield _LimitedReader(reader, limit), writer
            finally:
                writer.close()
    except TimeoutError as error:
        if not limit.expired():
            raise
        raise TimeoutError(f"the server sent no data for {SILENCE_S:g} s") from error


class _LimitedReader:
    """Reads from a connection, and restarts the connection's time limit with each piece of data."""

    def __init__(self, reader: asyncio.StreamReader, limit: asyncio.Timeout) -> None:
        self._reader = reader
        self._limit = limit
        self._loop = asyncio.get_running_loop()

    async def until(self, end: bytes) -> bytes:
        try:
            return self._extend(await self._reader.readuntil(end))
        except asyncio.LimitOverrunError as error:
            raise ValueError("the answer is not HTTP") from error

    async def exactly(self, count: int) -> bytes:
        return self._extend(await self._reader.readexactly(count))

    async def some(self) -> bytes:
        return self._extend(await self._reader.read(MAX_HEAD_BYTES))

    def _extend(self, piece: bytes) -> bytes:
        self._limit.reschedule(self._loop.time() + SILENCE_S)
        return piece


def _request_bytes(address: ServerAddress, method: str, path: str, body: Any) -> bytes:
    content = b"" if body is None else json.dumps(body).encode()
    host = f"[{address.host}]" if ":" in address.host else address.host
    lines = [
        f"{method} {address.base}{path} HTTP/1.1",
        f"Host: {host}:{address.port}",
        "Content-Type: application/json",
        f"Content-Length: {len(content)}",
        "Connection: close",
        *(f"{name}: {value}" for name, value in address.headers),
    ]
    return "\r\n".join([*lines, "", ""]).encode() + content


async def _head(reader: _LimitedReader) -> tuple[int, str]:
    """The HTTP status, and the text of the headers in lower case."""
    raw = (await reader.until(b"\r\n\r\n")).decode("latin-1")
    first, _, headers = raw.partition("\r\n")
    version, status, *_ = [*first.split(), "", ""]
    if not version.startswith("HTTP/") or not status.isdecimal():
        raise ValueError("the answer is not HTTP")
    return int(status), headers.lower()


async def _pieces(reader: _LimitedReader, headers: str) -> AsyncIterator[bytes]:
    if "transfer-encoding: chunked" not in headers:
        while piece := await reader.some():
            yield piece
        return
    while size := int((await reader.until(b"\n")).split(b";")[0], 16):
        yield (await reader.exactly(size + 2))[:-2]


async def _events(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The data of each server-sent event up to [DONE]."""
    rest = b""
    async for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            data = line.removeprefix(b"data: ").strip()
            if data == b"[DONE]":
                return
            if data and line.startswith(b"data: "):
                yield data
