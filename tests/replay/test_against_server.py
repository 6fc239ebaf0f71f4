"""A replay over HTTP against a real API server, and an engine that counts up."""

import asyncio
import socket
import threading
from dataclasses import replace

import pytest
from tests.engine_client.fake_engine_process import COMMAND
from tests.server.launching import launched

from quire.errors import ConfigurationError
from quire.replay import completion_client
from quire.replay.against_server import ServedModel, find_model, replay_to_server
from quire.replay.completion_client import ServerAddress
from quire.replay.figures import ReplayFigures, spread
from quire.replay.script import ModelBounds
from quire.traces.read import read_trace
from quire.traces.trace import Trace, TraceOptions, TraceRequest

CALL = TraceRequest(0.0, 20, 6, (0, 1))
GONE = replace(CALL, end="disconnect", options=TraceOptions(max_tokens=400))
TRACE = Trace(
    8,
    (
        CALL,
        replace(CALL, at_s=0.05, options=TraceOptions(num_choices=2, has_grammar=True)),
        replace(CALL, at_s=0.05, end="refused"),
        replace(GONE, at_s=0.1),
        replace(GONE, at_s=0.1, num_output_tokens=0, took_s=0.01),
        replace(CALL, at_s=0.2, num_output_tokens=10**5),
        replace(CALL, at_s=0.2, parent=0, think_s=0.1),
    ),
    hit_rate=0.25,
)


def replayed(trace: Trace, address: ServerAddress, **model: object) -> ReplayFigures:
    async def run() -> ReplayFigures:
        found = await find_model(address, None, None)
        return await replay_to_server(trace, address, replace(found, **model))  # type: ignore[arg-type]

    return asyncio.run(run())


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """The figures of a replay, and what the server recorded of it."""
    path = tmp_path_factory.mktemp("record") / "load"
    options = {"command": list(COMMAND), "fake": {"step_s": 0.02}}
    with launched(**options, record=str(path), api_keys=["a:replay-key-1"]) as server:
        figures = replayed(TRACE, ServerAddress.of(server.url, "replay-key-1"))
        refused = replayed(TRACE.first(1), ServerAddress.of(server.url, "replay-key-1"), name="x")
    return figures, refused, read_trace(path)


def test_lengths_are_forced_and_turns_wait(recorded) -> None:
    figures, _, trace = recorded
    answered = {each.number: each for each in figures.replies}
    assert sorted(answered) == [0, 1, 3, 4, 6]
    assert [answered[number].num_output_tokens for number in (0, 1, 6)] == [6, 12, 6]
    assert answered[6].at_s >= answered[0].end_s + 0.1
    # A busy machine may send several tokens in the first chunk, which have no gaps between them.
    assert 1 <= len(answered[0].gaps_s) <= 5
    assert 0 < sum(answered[0].gaps_s) <= answered[0].end_s - answered[0].first_s
    assert figures.left_out == {"refused when recorded": 1, "longer than max_model_len": 1}
    assert figures.notes == ["1 requests had a grammar, which is not replayed"]
    # What the server recorded of it: the second prompt has the first one's blocks.
    ends = sorted(each.end for each in trace.requests)
    assert ends == ["disconnect", "disconnect", "length", "length", "length", "refused"]
    assert {each.num_prompt_tokens for each in trace.requests if each.end != "refused"} == {20}


def test_refusals_are_counted_by_their_code(recorded) -> None:
    _, refused, _ = recorded
    assert refused.data()["refused"] == {"404 model_not_found": 1}
    assert refused.hit_rate is None


def test_figures_are_told_in_lines_and_data(recorded) -> None:
    figures, _, _ = recorded
    data, lines = figures.data(), figures.lines()
    assert data["requests"] == 5 and data["prompt_tokens"] == 60
    assert data["recorded"] == {"hit_rate": 0.25, "ttft_s": None}
    assert lines[1].endswith("(recorded: 25.0%)")
    assert spread([]) is None
    assert spread([3.0, 1.0, 2.0]) == {"mean": 2.0, "p50": 2.0, "p90": 3.0, "p99": 3.0}


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://x", "http://x:y", "http://"])
def test_a_wrong_url_is_refused(url: str) -> None:
    with pytest.raises(ConfigurationError, match="the server's URL is"):
        ServerAddress.of(url, None)
    assert ServerAddress.of("https://[::1]/a/v1/", None) == ServerAddress("::1", 443, True, "/a")


def test_unreachable_server_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    address = ServerAddress.of(f"http://127.0.0.1:{port}", None)
    with pytest.raises(ConfigurationError, match=f"127.0.0.1:{port} can't be asked"):
        asyncio.run(find_model(address, None, None))
    model = ServedModel("m", ModelBounds(1000, 1000))
    figures = asyncio.run(replay_to_server(TRACE.first(2), address, model))
    assert figures.data()["refused"] == {"broken off": 2}


def test_another_server_must_say_what_it_serves() -> None:
    answers = [b'{"data": [{"id": "m", "max_model_len": 9}]}', b"{}", b"[]"]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=_answer, args=(listener, answers))
        thread.start()
        address = ServerAddress.of(f"http://127.0.0.1:{listener.getsockname()[1]}", None)
        with pytest.raises(ConfigurationError, match="does not report the vocabulary size of m"):
            asyncio.run(find_model(address, None, None))
        with pytest.raises(
            ConfigurationError, match="does not list a model and its max_model_len at"
        ):
            asyncio.run(find_model(address, None, 100))
        thread.join()


def _answer(listener: socket.socket, answers: list[bytes]) -> None:
    for body in answers:
        connection, _ = listener.accept()
        with connection:
            connection.recv(1 << 16)
            connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n" + body)


EVENT = b"HTTP/1.1 200 OK\r\n\r\ndata: "


@pytest.mark.parametrize(
    ("answer", "refused"),
    [
        (EVENT + b'{"error": "out of order"}\n\n', "200 error"),
        (EVENT + b'{"choices": 5}\n\n', "broken off"),
        (EVENT + b"[1]\n\n", "broken off"),
        (b"nonsense\r\n\r\n", "broken off"),
        (b"x" * 200_000, "broken off"),
        (b"HTTP/1.1 \r\n\r\n", "broken off"),
    ],
)
def test_a_replay_continues_after_any_answer(answer: bytes, refused: str) -> None:
    trace = Trace(8, (CALL, replace(CALL, at_s=0.01)))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=_send, args=(listener, [answer] * 2))
        thread.start()
        address = ServerAddress.of(f"http://127.0.0.1:{listener.getsockname()[1]}", None)
        model = ServedModel("m", ModelBounds(1000, 1000))
        figures = asyncio.run(replay_to_server(trace, address, model))
        thread.join()
    assert figures.data()["refused"] == {refused: 2}


def test_a_server_that_says_nothing_has_broken_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(completion_client, "SILENCE_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = ServerAddress.of(f"http://127.0.0.1:{listener.getsockname()[1]}", None)
        model = ServedModel("m", ModelBounds(1000, 1000))
        figures = asyncio.run(replay_to_server(TRACE.first(1), address, model))
        with pytest.raises(ConfigurationError, match=r"the server sent no data for 0\.1 s"):
            asyncio.run(find_model(address, None, None))
    assert figures.data()["refused"] == {"broken off": 1}


def test_requests_come_at_their_times_whatever_has_ended() -> None:
    """And the first at once, whenever it came when it was recorded."""
    number = 400
    trace = Trace(8, tuple(replace(CALL, at_s=900 + i / 1000, tenant=i % 3) for i in range(number)))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    address = ServerAddress.of(f"http://127.0.0.1:{port}", None)
    model = ServedModel("m", ModelBounds(1000, 1000))
    figures = asyncio.run(replay_to_server(trace, address, model))
    assert [each.number for each in figures.replies] == list(range(number))
    assert all(each.at_s >= each.number / 1000 for each in figures.replies)
    assert figures.notes == ["3 tenants sent these requests; all are replayed as one"]


def _send(listener: socket.socket, answers: list[bytes]) -> None:
    for answer in answers:
        connection, _ = listener.accept()
        with connection:
            connection.recv(1 << 16)
            connection.sendall(answer)
