"""A small HTTP client that says when each text of a streamed completion came.

Little work per text, since it runs on the cores that the server computes with. Knows one request:
POST /v1/completions with token ids, streamed, of exact length. Standard library only.
"""

import asyncio
import http.client
import json
import socket
import time
from collections.abc import AsyncIterator


class AnswerError(RuntimeError):
    """The server answered with something else than a stream of completions."""


def free_port(host: str) -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def get_status(host: str, port: int, path: str) -> int | None:
    """The status of a GET, None where nobody listens."""
    connection = http.client.HTTPConnection(host, port, timeout=5)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    except OSError:
        return None
    finally:
        connection.close()


async def complete(host: str, port: int, prompt: list[int], num_tokens: int) -> list[float]:
    """When each text came, by time.perf_counter. Raises AnswerError, also for a wrong length."""
    body = {
        "prompt": prompt,
        "max_tokens": num_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(_request_bytes(host, json.dumps(body).encode()))
        times_s, usage = [], None
        async for data in _events(reader):
            now_s = time.perf_counter()
            found = json.loads(data)
            if "error" in found:
                raise AnswerError(data.decode())
            usage = found.get("usage") or usage
            if any(choice["text"] for choice in found["choices"]):
                times_s.append(now_s)
    finally:
        writer.close()
    got = None if usage is None else usage["completion_tokens"]
    if got != num_tokens or not times_s:
        raise AnswerError(f"asked for {num_tokens} tokens, got {got} in {len(times_s)} texts")
    return times_s


def _request_bytes(host: str, body: bytes) -> bytes:
    lines = (
        "POST /v1/completions HTTP/1.1",
        f"Host: {host}",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        "Connection: close",
    )
    return "\r\n".join([*lines, "", ""]).encode() + body


async def _events(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """The data of each server-sent event up to [DONE]."""
    header = await reader.readuntil(b"\r\n\r\n")
    if b" 200 " not in header.partition(b"\r\n")[0]:
        raise AnswerError((header + await reader.read()).decode(errors="replace"))
    is_chunked = b"transfer-encoding: chunked" in header.lower()
    rest = b""
    while piece := await (_chunk(reader) if is_chunked else reader.read(1 << 16)):
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            data = line.removeprefix(b"data: ").strip()
            if data == b"[DONE]":
                return
            if data and line.startswith(b"data: "):
                yield data


async def _chunk(reader: asyncio.StreamReader) -> bytes:
    """The next chunk of the transfer; empty at its end."""
    size = int(await reader.readline(), 16)
    data = await reader.readexactly(size + 2)
    return data[:-2]
