"""The crowd against servers that do what the test wants, and what is made of its figures."""

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

LoadScript = Callable[[str], ModuleType]
Answerer = Callable[[dict[str, Any], asyncio.StreamWriter], Awaitable[None]]
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"


@pytest.fixture
def crowd(load_script: LoadScript) -> ModuleType:
    return load_script("benchmarks.server.crowd")


@pytest.fixture
def clients(load_script: LoadScript) -> ModuleType:
    return load_script("benchmarks.server.clients")


def usage(count: int) -> bytes:
    found = {"choices": [], "usage": {"completion_tokens": count, "total_tokens": count}}
    return b"data: " + json.dumps(found).encode() + b"\n\ndata: [DONE]\n\n"


async def whole(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    """In pieces that cut through lines and words."""
    event = b'data: {"choices": [{"text": "x"}]}\n\n'
    data = HEAD + b": keep-alive\n\n" + event + usage(body["max_tokens"])
    for start in range(0, len(data), 50):
        writer.write(data[start : start + 50])
        await writer.drain()
        await asyncio.sleep(0)


async def too_few(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    writer.write(HEAD + usage(body["max_tokens"] - 1))


async def failing(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    writer.write(HEAD + b'data: {"error": {"message": "no"}}\n\n' + usage(body["max_tokens"]))


async def cut(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    writer.write(HEAD + b'data: {"choices": []}\n\n')


async def refusing(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 429 Too Many Requests\r\n\r\n{}")


async def silent(body: dict[str, Any], writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(0.5)  # the client has had enough by then


def play(crowd: ModuleType, answer: Answerer, **plan: Any) -> Any:
    """The tally of a short crowd on a server that answers so."""

    handlers = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        handlers.append(asyncio.current_task())
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = await reader.readuntil(b"\r\n\r\n")
            size = int(head.lower().partition(b"content-length: ")[2].split()[0])
            await answer(json.loads(await reader.readexactly(size)), writer)
        writer.close()

    async def run() -> Any:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        options = {"num_clients": 2, "duration_s": 0.1, "answer_limit_s": 30.0} | plan
        try:
            return await crowd.run_crowd(crowd.CrowdPlan("127.0.0.1", port, **options))
        finally:
            server.close()
            await asyncio.wait(handlers, timeout=10.0)  # all clients have gone

    return asyncio.run(run())


def test_whole_answers_are_counted_with_their_tokens(crowd: ModuleType) -> None:
    tally = play(crowd, whole, min_tokens=7, max_tokens=7)
    assert tally.num_answers >= 2
    assert tally.num_tokens == 7 * tally.num_answers
    assert not tally.problems
    assert len(tally.first_s) == len(tally.whole_s) == tally.num_answers
    assert 0 < min(tally.first_s) <= max(tally.whole_s)
    assert tally.gap_s > 0


@pytest.mark.parametrize(
    ("answer", "said"),
    [(too_few, "tokens instead of"), (failing, '"message": "no"'), (cut, "cut: ")],
)
def test_wrong_answers_are_tallied_as_problems(
    crowd: ModuleType, answer: Answerer, said: str
) -> None:
    tally = play(crowd, answer)
    assert tally.num_answers == 0
    assert all(said in problem for problem in tally.problems)
    assert sum(tally.problems.values()) >= 2


def test_refusals_and_stuck_answers_are_told_apart(crowd: ModuleType) -> None:
    assert play(crowd, refusing).num_refused >= 2
    tally = play(crowd, silent, answer_limit_s=0.05)
    assert tally.num_stuck >= 2
    assert (tally.num_answers, tally.num_refused, len(tally.problems)) == (0, 0, 0)


def test_every_kind_of_neighbour_comes(crowd: ModuleType) -> None:
    tally = play(crowd, whole, duration_s=0.3, **dict.fromkeys(crowd.NEIGHBOURS, 1))
    assert set(tally.happenings) == set(crowd.NEIGHBOURS)
    assert tally.num_answers and not tally.problems


def test_growth_is_between_the_second_and_the_last_quarter(clients: ModuleType) -> None:
    assert clients.growth_bytes([0, 50, 100, 100, 100, 100, 100, 100]) == 0
    assert clients.growth_bytes([0, 0, 100, 100, 100, 100, 130, 130]) == 30
    assert clients.growth_bytes([7, 9]) == 2


@pytest.mark.parametrize(
    ("change", "good"),
    [
        ({}, True),
        ({"num_answers": 0}, False),
        ({"num_stuck": 1}, False),
        ({"problems": {"cut": 1}}, False),
        ({"num_held_blocks_after": 1}, False),
        ({"num_refused": 3}, True),
    ],
)
def test_a_run_is_good_if_no_client_was_harmed(
    clients: ModuleType, change: dict[str, Any], good: bool
) -> None:
    found = {
        "num_answers": 5,
        "num_stuck": 0,
        "problems": {},
        "num_held_blocks_after": 0,
        "num_running_after": 0,
    }
    assert clients.is_good(found | change) is good


def test_the_report_has_what_was_measured(clients: ModuleType, crowd: ModuleType) -> None:
    tally = crowd.Tally(num_answers=3, num_tokens=60, first_s=[0.1, 0.2], whole_s=[0.5, 1.0])
    plan = crowd.CrowdPlan("h", 1, 500, 60.0, never_read=5)

    watched = SimpleNamespace(
        samples=[clients.Sample(float(at), 1 << 20, 2 << 20) for at in range(1, 5)]
    )

    after = {"num_held_blocks": 0, "num_running": 0, "num_waiting": 0}
    found = clients.summary(plan, tally, watched, (1.5, 2.5), after)
    assert json.loads(json.dumps(found)) == found
    text = clients.report(found)
    for line in ("| 5 never_read |", "| 3; 15 |", "| 1.5; 1; +0.0 |", "| 2.5; 2; +0.0 |"):
        assert line in text
