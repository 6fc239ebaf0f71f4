"""Answers end with their client: the pieces alone, then a real server whose clients go away."""

import asyncio
import json
import socket

import httpx
import msgspec
import pytest
from tests.server.launching import WAIT_S

from quire.errors import EngineDeadError, InvalidRequestError
from quire.server.streaming import (
    ClientGoneError,
    EventStream,
    answer,
    event,
    json_response,
    unless_disconnected,
)

DISCONNECT = {"type": "http.disconnect"}


class Answer(msgspec.Struct):
    text: str


async def never():
    await asyncio.Event().wait()


async def gone():
    return DISCONNECT


def test_work_is_awaited_while_the_client_stays():
    async def work():
        await asyncio.sleep(0)
        return 3

    assert asyncio.run(unless_disconnected(never, work())) == 3


def test_work_is_cancelled_and_has_ended_when_the_client_goes():
    ended = []

    async def work():
        try:
            await never()
        finally:
            await asyncio.sleep(0)
            ended.append(True)

    with pytest.raises(ClientGoneError):
        asyncio.run(unless_disconnected(gone, work()))
    assert ended == [True]


def test_cancelling_the_answer_cancels_the_work():
    ended = []

    async def work():
        try:
            await never()
        finally:
            ended.append(True)

    async def run():
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(unless_disconnected(never, work()), 0.01)

    asyncio.run(run())
    assert ended == [True]


def test_the_works_own_error_is_raised():
    async def work():
        raise InvalidRequestError("no")

    with pytest.raises(InvalidRequestError):
        asyncio.run(unless_disconnected(never, work()))


def test_an_answer_is_json_and_nobody_gets_one_who_left():
    async def work():
        return Answer("x")

    assert asyncio.run(answer(never, work())).body == b'{"text":"x"}'
    assert asyncio.run(answer(gone, never())).status_code == 499
    assert json_response(Answer("x")).media_type == "application/json"


def run_stream(events, receive=never):
    """The messages that the response sends."""
    sent = []

    async def send(message):
        sent.append(message)

    asyncio.run(EventStream(events)({"type": "http"}, receive, send))
    return sent


def test_events_go_out_one_by_one_and_end_with_done():
    async def events():
        yield event({"a": 1})
        yield event({"a": 2})

    start, *bodies, end = run_stream(events())
    assert start["status"] == 200
    assert (b"content-type", b"text/event-stream; charset=utf-8") in start["headers"]
    assert [body["body"] for body in bodies] == [
        b'data: {"a":1}\n\n',
        b'data: {"a":2}\n\n',
        b"data: [DONE]\n\n",
    ]
    assert all(body["more_body"] for body in bodies)
    assert not end["more_body"]


def test_an_error_before_the_first_event_is_raised_with_nothing_sent():
    async def events():
        raise InvalidRequestError("no")
        yield b""

    with pytest.raises(InvalidRequestError):
        run_stream(events())


def test_an_error_after_the_first_event_becomes_an_event():
    async def events():
        yield event({"a": 1})
        raise EngineDeadError("gone")

    bodies = [message["body"] for message in run_stream(events())[1:]]
    error = json.loads(bodies[1].removeprefix(b"data: "))["error"]
    assert (error["message"], error["code"]) == ("gone", "engine_dead")
    assert bodies[-2:] == [b"data: [DONE]\n\n", b""]


def test_a_client_that_leaves_closes_the_events_where_they_are():
    ended = []

    async def events():
        try:
            yield event({"a": 1})
            await never()
        finally:
            ended.append(True)

    assert len(run_stream(events(), gone)) <= 2
    assert ended == [True]


ENDLESS = {
    "prompt": "def f(",
    "max_tokens": 1000,
    "ignore_eos": True,
    "n": 4,
    "temperature": 1.0,
}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_client_that_leaves_a_stream_frees_its_blocks(server, http, path):
    wish = {name: value for name, value in ENDLESS.items() if name != "prompt"} | {"stream": True}
    wish |= (
        {"prompt": "def f("}
        if path == "/v1/completions"
        else {"messages": [{"role": "user", "content": "hello"}]}
    )
    with http.stream("POST", path, json=wish) as response:
        lines = response.iter_lines()
        assert next(lines).startswith("data: ")
        assert server.stats()["num_running"] == 4
        before = server.stats()["num_steps"]
    after = server.wait_until(lambda stats: stats["num_held_blocks"] == 0)
    assert after["num_running"] == after["num_waiting"] == 0
    assert after["num_steps"] - before < 500


def test_a_client_that_leaves_while_it_waits_for_a_whole_answer_frees_its_blocks(server):
    host, port = server.url.removeprefix("http://").split(":")
    body = json.dumps(ENDLESS).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    with socket.create_connection((host, int(port)), timeout=WAIT_S) as sock:
        sock.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        server.wait_until(lambda stats: stats["num_running"] == 4)
    after = server.wait_until(lambda stats: stats["num_held_blocks"] == 0)
    assert after["num_running"] == 0


def test_a_client_that_leaves_while_it_waits_for_a_row_leaves_the_queue(server, http):
    first = ENDLESS | {"n": 16, "stream": True, "max_tokens": 500}  # as many as there are rows
    with http.stream("POST", "/v1/completions", json=first) as response:
        lines = response.iter_lines()
        next(lines)
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{server.url}/v1/completions", json=ENDLESS, timeout=0.3)
        server.wait_until(lambda stats: stats["num_waiting"] == 0)
        assert server.stats()["num_running"] == 16


def test_a_stop_string_in_the_stream_ends_the_branch_in_the_engine(server, http):
    free = http.post("/v1/completions", json=ENDLESS | {"max_tokens": 8, "n": 1, "seed": 1}).json()
    stop = free["choices"][0]["text"][4:7]
    wish = ENDLESS | {"stop": stop, "n": 1, "seed": 1}
    choice = http.post("/v1/completions", json=wish).json()["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    assert server.wait_until(lambda stats: stats["num_held_blocks"] == 0)["num_running"] == 0
