"""Answers end with their client: the pieces alone, then a real server whose clients go away."""

import asyncio
import json
import socket
from itertools import pairwise

import httpx
import msgspec
import pytest
from tests.server.launching import WAIT_S

from quire.errors import EngineDeadError, InvalidRequestError
from quire.server.http.streaming import (
    SHORT_ANSWER_BYTES,
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


class Sent(list):
    """What an application sends: the head, and bodies."""

    async def __call__(self, message):
        self.append(message)

    @property
    def headers(self):
        return {name.decode(): value.decode() for name, value in self[0]["headers"]}

    @property
    def body(self):
        return b"".join(message["body"] for message in self[1:])


def sent_of(parts, receive=never, work=None):
    """What is sent of an answer of these parts, and whether they were closed."""
    closed = []

    async def pieces():
        try:
            for part in parts:
                await asyncio.sleep(0)
                yield part
        finally:
            closed.append(True)

    async def run():
        sent = Sent()
        response = await answer(receive, work or asyncio.sleep(0), pieces())
        await response({"type": "http"}, receive, sent)
        return sent

    return asyncio.run(run()), closed


def test_a_short_answer_goes_out_at_once_with_its_length():
    sent, closed = sent_of([b'{"text":', b'"x"}'])
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]
    assert sent[0]["status"] == 200 and not sent[1]["more_body"]
    assert sent.headers == {"content-length": "12", "content-type": "application/json"}
    assert sent.body == b'{"text":"x"}' and closed == [True]


def test_a_long_answer_goes_out_part_by_part_as_it_is_made():
    parts = [b"x" * (SHORT_ANSWER_BYTES // 2)] * 7
    sent, closed = sent_of(parts)
    assert sent.body == b"".join(parts) and closed == [True]
    assert "content-length" not in sent.headers
    assert max(len(message["body"]) for message in sent[1:]) <= 1.5 * SHORT_ANSWER_BYTES
    assert [message["more_body"] for message in sent[1:]] == [True] * 5 + [False]


def test_requests_dropped_during_a_step_get_no_answer():
    assert asyncio.run(answer(gone, never(), aiter_of(b"x"))).status_code == 499


async def aiter_of(*parts):
    for part in parts:
        yield part


def test_an_answer_ends_with_its_client():
    leaves = asyncio.Event()

    async def receive():
        await leaves.wait()
        return DISCONNECT

    def parts():
        yield from [b"x" * SHORT_ANSWER_BYTES] * 3
        leaves.set()
        while True:
            yield b"x"

    sent, closed = sent_of(parts(), receive)
    assert sent[-1]["more_body"] and closed == [True]


def test_errors_of_computing_an_answer_are_raised_before_anything_is_sent():
    async def work():
        raise InvalidRequestError("no")

    with pytest.raises(InvalidRequestError):
        sent_of([b"x"], work=work())


def test_a_content_of_few_fields_is_json():
    assert json_response(Answer("x")).media_type == "application/json"
    assert json_response(Answer("x")).body == b'{"text":"x"}'


def test_the_tick_is_called_at_the_times_that_it_asks_for_until_the_work_ends():
    ticks = []

    async def tick():
        ticks.append(asyncio.get_running_loop().time())
        return 0.005

    async def work():
        while len(ticks) < 4:
            await asyncio.sleep(0.001)
        return "done"

    assert asyncio.run(unless_disconnected(never, work(), tick)) == "done"
    assert all(later - earlier >= 0.004 for earlier, later in pairwise(ticks))


def run_stream(events, receive=never, *, keep_alive_s=60.0, on_send=None):
    """The messages that the response sends."""
    sent = []

    async def send(message):
        if on_send is not None:
            await on_send(message)
        sent.append(message)

    asyncio.run(EventStream(events, keep_alive_s)({"type": "http"}, receive, send))
    return sent


def test_events_go_out_one_by_one_and_end_with_done():
    async def events():
        yield event({"a": 1})
        yield event({"a": 2}) + event({"a": 3})

    start, *bodies = run_stream(events())
    assert start["status"] == 200
    assert (b"content-type", b"text/event-stream; charset=utf-8") in start["headers"]
    assert (b"x-accel-buffering", b"no") in start["headers"]
    assert [body["body"] for body in bodies] == [
        b'data: {"a":1}\n\n',
        b'data: {"a":2}\n\ndata: {"a":3}\n\n',
        b"data: [DONE]\n\n",
    ]
    assert [body["more_body"] for body in bodies] == [True, True, False]


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
    assert bodies[-1] == b"data: [DONE]\n\n"


def comment_counter():
    """(a list that grows with each comment that is sent, the function that sees the messages)."""
    comments = []

    async def on_send(message):
        if message.get("body") == b": keep-alive\n\n":
            comments.append(message)

    return comments, on_send


def test_a_stream_without_news_gets_comments():
    comments, on_send = comment_counter()

    async def events():
        yield event({"a": 1})
        while len(comments) < 3:
            await asyncio.sleep(0.001)
        yield event({"a": 2})

    _, first, *between, second, done = run_stream(events(), keep_alive_s=0.01, on_send=on_send)
    assert [first["body"], second["body"]] == [event({"a": 1}), event({"a": 2})]
    assert done["body"] == b"data: [DONE]\n\n"
    assert len(between) >= 3 and between == comments


def test_a_busy_stream_gets_none():
    async def events():
        for number in range(20):
            yield event(number)
            await asyncio.sleep(0.002)

    sent = run_stream(events(), keep_alive_s=5.0)
    assert len(sent) == 1 + 20 + 1


def test_before_the_first_event_the_head_goes_out_with_the_first_comment():
    comments, on_send = comment_counter()

    async def events():
        while not comments:
            await asyncio.sleep(0.001)
        raise EngineDeadError("gone")
        yield b""

    start, comment, *_, error, done = run_stream(events(), keep_alive_s=0.01, on_send=on_send)
    assert (start["type"], start["status"]) == ("http.response.start", 200)
    assert comment["body"] == b": keep-alive\n\n"
    assert json.loads(error["body"].removeprefix(b"data: "))["error"]["code"] == "engine_dead"
    assert done["body"] == b"data: [DONE]\n\n"


def test_messages_never_overlap_and_no_comment_goes_to_one_who_does_not_read():
    sending = []

    async def on_send(message):
        assert not sending
        sending.append(message)
        slow = message.get("body", b"").startswith(b"data: {")
        await asyncio.sleep(0.05 if slow else 0)
        sending.clear()

    async def events():
        yield event({"a": 1})
        yield event({"a": 2})

    sent = run_stream(events(), keep_alive_s=0.01, on_send=on_send)
    assert [message.get("body") for message in sent] == [
        None,
        event({"a": 1}),
        event({"a": 2}),
        b"data: [DONE]\n\n",
    ]


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
        stats = server.wait_until(lambda stats: stats["num_waiting"] == 0)
        assert stats["num_running"] != 4, "the second call got rows, once the first had ended"


def test_a_stop_string_in_the_stream_ends_the_branch_in_the_engine(server, http):
    free = http.post("/v1/completions", json=ENDLESS | {"max_tokens": 8, "n": 1, "seed": 1}).json()
    stop = free["choices"][0]["text"][4:7]
    wish = ENDLESS | {"stop": stop, "n": 1, "seed": 1}
    choice = http.post("/v1/completions", json=wish).json()["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    assert server.wait_until(lambda stats: stats["num_held_blocks"] == 0)["num_running"] == 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_misses_its_deadline_is_ended_and_told(server, http, stream):
    wish = ENDLESS | {"deadline_s": 0.1, "stream": stream}
    answer = http.post("/v1/completions", json=wish)
    if stream:
        *_, last, done = answer.text.strip().split("\n\n")
        assert (answer.status_code, done) == (200, "data: [DONE]")
        error = json.loads(last.removeprefix("data: "))["error"]
    else:
        assert answer.status_code == 408
        assert answer.headers["x-should-retry"] == "false"
        error = answer.json()["error"]
    assert error["code"] == "deadline_exceeded"
    assert "0.1 s" in error["message"]


def test_a_client_that_leaves_while_its_prompt_is_tokenized_leaves_nothing(server, http):
    words = ["a word that is never written"] * 400  # long enough to be worked on in a thread
    body = json.dumps(ENDLESS | {"bad_words": words, "stream": True}).encode()
    host, port = server.url.removeprefix("http://").split(":")
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    for _ in range(3):
        with socket.create_connection((host, int(port)), timeout=WAIT_S) as sock:
            sock.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    assert http.post("/v1/completions", json=ENDLESS | {"max_tokens": 2}).status_code == 200
    server.wait_until(lambda stats: stats["num_running"] == stats["num_waiting"] == 0)


def test_options_that_leave_no_token_are_told_as_the_callers_own(http, tokenizer):
    wish = {"prompt": "def f(", "min_tokens": 1, "allowed_token_ids": [tokenizer.eos_token_id]}
    answer = http.post("/v1/completions", json=wish)
    assert (answer.status_code, answer.json()["error"]["code"]) == (422, "no_token_left")
