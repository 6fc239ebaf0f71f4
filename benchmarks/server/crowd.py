"""Many streaming clients at once, and neighbours that behave badly beside them.

Little work per event, since all of it runs on the cores that the server computes with. Standard
library only, and nothing else of benchmarks/: `clients.py` and `http_cost.py` use it, and so do the
tests of the server.
"""

import asyncio
import contextlib
import json
import random
import re
import socket
import struct
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, cast

DONE = b"data: [DONE]\n\n"
ERROR = b'data: {"error"'
COMMENT = b": keep-alive"
TAIL_BYTES = 1024
NEIGHBOURS = ("never_read", "slow_read", "slow_body", "slow_head", "vanish")

_COUNT = re.compile(rb'"completion_tokens": ?(\d+)')


@dataclass(frozen=True, slots=True)
class CrowdPlan:
    """Who comes, for how long.

    num_clients: each asks for one streamed answer after the other, of min_tokens to max_tokens.
    duration_s: after it nobody asks anew. answer_limit_s: an answer that takes longer is stuck.
    The others are neighbours, and how many there are: never_read asks for much and reads nothing;
    slow_read takes a byte a second; slow_body and slow_head send a byte a second; vanish goes away
    in the middle of an answer, again and again.
    """

    host: str
    port: int
    num_clients: int
    duration_s: float
    min_tokens: int = 16
    max_tokens: int = 64
    answer_limit_s: float = 60.0
    never_read: int = 0
    slow_read: int = 0
    slow_body: int = 0
    slow_head: int = 0
    vanish: int = 0
    seed: int = 0


@dataclass(slots=True)
class Tally:
    """The clients' results. problems: faults of answers, and how often each occurred.

    gap_s: the longest time that anybody waited for a byte, the first one included.
    """

    num_answers: int = 0
    num_refused: int = 0
    num_stuck: int = 0
    num_tokens: int = 0
    num_comments: int = 0
    gap_s: float = 0.0
    problems: Counter[str] = field(default_factory=Counter)
    first_s: list[float] = field(default_factory=list)
    whole_s: list[float] = field(default_factory=list)
    happenings: Counter[str] = field(default_factory=Counter)

    def add(self, answer: "Answer") -> None:
        self.num_comments += answer.num_comments
        self.gap_s = max(self.gap_s, answer.gap_s)
        if answer.problem is not None:
            self.problems[answer.problem] += 1
        elif answer.status in (429, 503):
            self.num_refused += 1
        else:
            self.num_answers += 1
            self.num_tokens += answer.num_tokens
            self.first_s.append(answer.first_s - answer.sent_s)
            self.whole_s.append(answer.last_s - answer.sent_s)


class Answer(asyncio.Protocol):
    """One request and what comes back, on a connection of its own. `done` ends with it."""

    def __init__(self, request: bytes, num_expected: int, *, is_stream: bool = True) -> None:
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.status: int | None = None
        self.problem: str | None = None
        self.num_tokens = 0
        self.num_comments = 0
        self.sent_s = self.first_s = self.last_s = self.gap_s = 0.0
        self.transport: asyncio.Transport | None = None
        self._request = request
        self._num_expected = num_expected
        self._is_stream = is_stream
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast(asyncio.Transport, transport)
        self.transport = transport
        self.sent_s = self.last_s = time.perf_counter()
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        now_s = time.perf_counter()
        self.gap_s = max(self.gap_s, now_s - self.last_s)
        self.last_s = now_s
        text = self._tail + data
        if self.status is None and b"\r\n" in text:
            self.status = int(text.split(b" ", 2)[1])
        self.num_comments += data.count(COMMENT)
        if not self.first_s and b"data: {" in text:
            self.first_s = now_s
        if ERROR in text:
            self.problem = text[text.index(ERROR) :][:200].decode(errors="replace")
        if DONE in text:
            self._end(text)
        self._tail = text[-TAIL_BYTES:]

    def connection_lost(self, error: Exception | None) -> None:
        if self.done.done():
            return
        if self.status == 200 and not self._is_stream:
            self._end(self._tail)
            return
        if self.status not in (429, 503):
            self.problem = self.problem or f"cut: {error or 'closed'} {self._tail[-200:]!r}"
        self.done.set_result(None)

    def _end(self, text: bytes) -> None:
        counts = _COUNT.findall(text)
        self.num_tokens = int(counts[-1]) if counts else 0
        if self.problem is None and self.num_tokens != self._num_expected:
            self.problem = f"{self.num_tokens} tokens instead of {self._num_expected}"
        if not self.done.done():
            self.done.set_result(None)
        if self.transport is not None:
            self.transport.close()


def request_bytes(path: str, body: dict[str, Any]) -> bytes:
    """A POST whose connection ends with its answer."""
    content = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + content


def stream_body(number: int, num_tokens: int, **more: Any) -> dict[str, Any]:
    """The body of a streamed completion of exactly num_tokens tokens, with usage at its end."""
    return {
        "prompt": f"def function_{number}(",
        "max_tokens": num_tokens,
        "temperature": 1.0,
        "seed": number,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    } | more


async def ask(
    host: str,
    port: int,
    request: bytes,
    num_expected: int,
    limit_s: float,
    *,
    is_stream: bool = True,
) -> Answer | None:
    """The answer once it has ended; None if that took longer than limit_s."""

    def make() -> Answer:
        return Answer(request, num_expected, is_stream=is_stream)

    _, answer = await asyncio.get_running_loop().create_connection(make, host, port)
    try:
        async with asyncio.timeout(limit_s):
            await answer.done
    except TimeoutError:
        return None
    finally:
        if answer.transport is not None:
            answer.transport.abort()
    return answer


async def run_crowd(
    plan: CrowdPlan, each_second: Callable[[], Awaitable[None]] | None = None
) -> Tally:
    """Everybody at once; returns when the last answer has ended. each_second: called meanwhile."""
    tally, until_s = Tally(), time.perf_counter() + plan.duration_s
    neighbours = [
        asyncio.ensure_future(_repeat(kind, number, plan, tally))
        for kind in NEIGHBOURS
        for number in range(getattr(plan, kind))
    ]
    ticker = asyncio.ensure_future(_tick(each_second)) if each_second is not None else None
    try:
        await asyncio.gather(
            *(_client(plan, number, tally, until_s) for number in range(plan.num_clients))
        )
    finally:
        tasks = [*neighbours, *([ticker] if ticker is not None else [])]
        for task in tasks:
            task.cancel()
        found = await asyncio.gather(*tasks, return_exceptions=True)
    for one in found:
        if isinstance(one, Exception):
            raise one
    return tally


async def _tick(action: Callable[[], Awaitable[None]]) -> None:
    while True:
        await action()
        await asyncio.sleep(1.0)


async def _client(plan: CrowdPlan, number: int, tally: Tally, until_s: float) -> None:
    choose = random.Random(plan.seed * 1_000_003 + number)
    while time.perf_counter() < until_s:
        num_tokens = choose.randint(plan.min_tokens, plan.max_tokens)
        request = request_bytes("/v1/completions", stream_body(number, num_tokens))
        try:
            answer = await ask(plan.host, plan.port, request, num_tokens, plan.answer_limit_s)
        except OSError as error:
            tally.problems[f"no connection: {error}"] += 1
            await asyncio.sleep(0.2)
            continue
        if answer is None:
            tally.num_stuck += 1
            continue
        tally.add(answer)
        if answer.status != 200:
            await asyncio.sleep(0.2)


async def _repeat(kind: str, number: int, plan: CrowdPlan, tally: Tally) -> None:
    """A neighbour that comes again whenever it was cut off, until it is cancelled."""
    act = _ACTS[kind]
    choose = random.Random(plan.seed * 1_000_003 + number)
    loop = asyncio.get_running_loop()
    while True:
        with socket.socket() as sock:
            sock.setblocking(False)
            if kind in ("never_read", "slow_read"):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            with contextlib.suppress(OSError):  # cut off: that is what is being tried
                await loop.sock_connect(sock, (plan.host, plan.port))
                tally.happenings[kind] += 1
                await act(sock, choose, number)
        await asyncio.sleep(0.05)


def _long_request(number: int) -> bytes:
    body = stream_body(number, 400, n=2, logprobs=5)
    return request_bytes("/v1/completions", body)


async def _never_read(sock: socket.socket, choose: random.Random, number: int) -> None:
    await asyncio.get_running_loop().sock_sendall(sock, _long_request(number))
    await asyncio.sleep(3600.0)


async def _slow_read(sock: socket.socket, choose: random.Random, number: int) -> None:
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(sock, _long_request(number))
    while await loop.sock_recv(sock, 1):
        await asyncio.sleep(1.0)


async def _slow_body(sock: socket.socket, choose: random.Random, number: int) -> None:
    await _send_slowly(sock, _long_request(number), whole_head=True)


async def _slow_head(sock: socket.socket, choose: random.Random, number: int) -> None:
    await _send_slowly(sock, _long_request(number), whole_head=False)


async def _send_slowly(sock: socket.socket, request: bytes, *, whole_head: bool) -> None:
    loop = asyncio.get_running_loop()
    start = request.index(b"\r\n\r\n") + 4 if whole_head else 1
    await loop.sock_sendall(sock, request[:start])
    for position in range(start, len(request)):
        await asyncio.sleep(1.0)
        await loop.sock_sendall(sock, request[position : position + 1])


async def _vanish(sock: socket.socket, choose: random.Random, number: int) -> None:
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(sock, _long_request(number))
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(choose.random()):
            await loop.sock_recv(sock, 1 << 16)
    if choose.random() < 0.5:  # half of them with a reset instead of an end
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


_ACTS: dict[str, Callable[[socket.socket, random.Random, int], Awaitable[None]]] = {
    "never_read": _never_read,
    "slow_read": _slow_read,
    "slow_body": _slow_body,
    "slow_head": _slow_head,
    "vanish": _vanish,
}
