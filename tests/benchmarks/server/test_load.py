"""The load test: its client against servers that say what the test wants, arrivals, table."""

import asyncio
import contextlib
import json
import time
from collections.abc import Awaitable, Callable
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest

LoadScript = Callable[[str], ModuleType]
HEADER = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"


@pytest.fixture
def client(load_script: LoadScript) -> ModuleType:
    return load_script("benchmarks.server.load_client")


def text(words: str) -> bytes:
    return b"data: " + json.dumps({"choices": [{"text": words}]}).encode() + b"\n\n"


def usage(count: int) -> bytes:
    found = {"choices": [], "usage": {"completion_tokens": count}}
    return b"data: " + json.dumps(found).encode() + b"\n\ndata: [DONE]\n\n"


def chunked(*pieces: bytes) -> list[bytes]:
    framed = [f"{len(piece):x}\r\n".encode() + piece + b"\r\n" for piece in pieces]
    return [HEADER + b"Transfer-Encoding: chunked\r\n\r\n", *framed, b"0\r\n\r\n"]


async def ask(client: ModuleType, answer: list[bytes], pause_s: float = 0.0) -> Any:
    """(times, the request's body) of one completion that is answered with these bytes."""
    bodies, ended = [], asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        header = await reader.readuntil(b"\r\n\r\n")
        size = int(header.lower().partition(b"content-length: ")[2].split()[0])
        bodies.append(json.loads(await reader.readexactly(size)))
        for piece in answer:
            writer.write(piece)
            await asyncio.sleep(pause_s)
        writer.close()
        with contextlib.suppress(ConnectionError):  # a client that has seen enough goes first
            await writer.wait_closed()
        ended.set()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        try:
            return await client.complete("127.0.0.1", port, [5, 6], 3), bodies[0]
        finally:
            await ended.wait()


def run(work: Awaitable[Any]) -> Any:
    return asyncio.run(asyncio.wait_for(work, 20))  # type: ignore[arg-type]


def test_each_text_has_its_time(client: ModuleType) -> None:
    answer = chunked(text("a"), text("b"), text("c"), usage(3))
    started_s = time.perf_counter()
    times_s, body = run(ask(client, answer, pause_s=0.1))
    assert len(times_s) == 3 and started_s < times_s[0]
    assert all(late - early > 0.02 for early, late in pairwise(times_s))
    assert (body["prompt"], body["max_tokens"]) == ([5, 6], 3)
    assert body["ignore_eos"] and body["stream"] and body["temperature"] == 0


def test_events_may_be_cut_anywhere_and_empty_texts_do_not_count(client: ModuleType) -> None:
    stream = text("a") + text("") + text("bc") + usage(3)
    cut = [stream[first : first + 7] for first in range(0, len(stream), 7)]
    assert len(run(ask(client, chunked(*cut)))[0]) == 2
    plain = [HEADER + b"Connection: close\r\n\r\n", *cut]
    assert len(run(ask(client, plain))[0]) == 2


@pytest.mark.parametrize(
    "answer",
    [
        [b"HTTP/1.1 429 Too Many Requests\r\n\r\nlater"],
        chunked(text("a"), usage(2)),
        chunked(text("a")),
        chunked(b'data: {"error": {"message": "no"}}\n\n'),
    ],
    ids=["refused", "too short", "cut off", "error"],
)
def test_a_wrong_answer_is_no_timing(client: ModuleType, answer: list[bytes]) -> None:
    with pytest.raises(client.AnswerError):
        run(ask(client, answer))


def test_a_port_without_a_listener_has_no_status(client: ModuleType) -> None:
    assert client.get_status("127.0.0.1", client.free_port("127.0.0.1"), "/health") is None


def test_arrivals_are_a_poisson_process(load_script: LoadScript) -> None:
    arrival_times_s = load_script("benchmarks.server.load").arrival_times_s
    times_s = arrival_times_s(4.0, 4001, seed=3)
    assert times_s[0] == 0.0 and times_s == sorted(times_s)
    assert times_s[-1] == pytest.approx(1000, rel=0.1)
    assert arrival_times_s(4.0, 10, seed=3) == times_s[:10]
    assert arrival_times_s(float("inf"), 5, seed=3) == [0.0] * 5


def test_the_table_has_medians_of_quiet_rounds(load_script: LoadScript) -> None:
    load, setup = load_script("benchmarks.server.load"), load_script("benchmarks.cpu.peer_setup")
    names = load.SHOWN

    def one(engine: str, index: int, value: float, others: float) -> Any:
        return load.Round(engine, 2.0, index, dict.fromkeys(names, value), 0.5, others)

    rounds = [
        one("quire bf16", 0, 10.0, 0.0),
        one("quire bf16", 1, 99.0, 0.7),
        one("vLLM bf16", 0, 500.0, 0.2),
    ]
    args = load.parse_args(["--setup", "s", "--model", "m", "--out", "o", "--rates", "2"])
    report = load.make_report(rounds, args, setup.Model("m", None)).splitlines()
    assert report[2] == "| 2 | quire bf16 | 10.0 | 10.0 | 10.0 | 10.0 | 10.0 |"
    assert report[3] == "| 2 | vLLM bf16 (loud) | 500 | 500 | 500 | 500 | 500 |"
    assert report[-1].endswith("quire bf16 0.500, vLLM bf16 0.500.")


@pytest.mark.parametrize("rates", ["0", "-1", "2,2", "x"])
def test_rates_that_mean_nothing_are_refused(load_script: LoadScript, rates: str) -> None:
    words = ["--setup", "s", "--model", "m", "--out", "o", "--rates", rates]
    with pytest.raises(SystemExit):
        load_script("benchmarks.server.load").parse_args(words)
