"""/health, /live and /ready in every state of the engine, and of a real server."""

import asyncio
import signal
import time
from types import SimpleNamespace

import httpx
import pytest
from starlette.applications import Starlette
from tests.engine_client.fake_engine_process import COMMAND
from tests.server.launching import WAIT_S, launched

from quire.engine_client.recovery import EngineState
from quire.errors import EngineDeadError
from quire.server.http.errors import error_handlers
from quire.server.routes.admin import health
from quire.server.served_models import ServedModels

STATS = {"num_running": 3, "num_held_blocks": 7, "times": {"queue_s": {}}}


class Engine:
    """An engine in some state; it answers, or it doesn't."""

    num_open, num_restarts, failure = 5, 2, EngineDeadError("/secret/path is broken")

    def __init__(self, state=EngineState.READY, answers=True):
        self.state = state
        self.answers = answers
        self.asked = 0
        self.engines_by_name = {"": self}

    async def stats(self, timeout_s):
        self.asked += 1
        if not self.answers:
            raise EngineDeadError("no answer")
        return STATS


def get(path, engine, *, draining=False, is_operator=True):
    """The answer of an application with nothing else in it."""

    async def ask():
        app = Starlette(routes=health.router.routes, exception_handlers=error_handlers())
        service = SimpleNamespace(
            engine=engine,
            drain=SimpleNamespace(is_on=draining),
            model_names=("m",),
            created_s=0,
        )
        app.state.models = ServedModels.of(service)

        async def guarded(scope, receive, send):
            scope.setdefault("state", {})["is_operator"] = is_operator
            await app(scope, receive, send)

        transport = httpx.ASGITransport(app=guarded)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.get(path)

    return asyncio.run(ask())


def test_the_operator_gets_the_engine_s_numbers_but_no_histograms():
    answer = get("/health", Engine())
    assert answer.status_code == 200
    assert answer.json() == {
        "status": "ok",
        "engine": {"num_running": 3, "num_held_blocks": 7},
        "num_open": 5,
        "num_restarts": 2,
    }


def test_others_are_told_the_status_alone_and_the_engine_is_not_asked():
    engine = Engine()
    answer = get("/health", engine, is_operator=False)
    assert (answer.status_code, answer.json()) == (200, {"status": "ok"})
    assert engine.asked == 0


@pytest.mark.parametrize("state", [EngineState.STARTING, EngineState.RECOVERING])
def test_a_server_that_recovers_lives(state):
    answer = get("/health", Engine(state, answers=False))
    assert answer.status_code == 200
    assert (answer.json()["status"], answer.json()["engine"]) == (state.value, None)
    assert get("/live", Engine(state, answers=False)).json() == {"status": "live"}


def test_a_step_that_takes_long_is_no_reason_to_restart_the_server():
    answer = get("/health", Engine(answers=False))
    assert (answer.status_code, answer.json()["status"]) == (200, "ok")


@pytest.mark.parametrize("is_operator", [True, False])
@pytest.mark.parametrize("path", ["/health", "/live"])
def test_an_engine_that_has_failed_for_good_is_told_without_its_insides(path, is_operator):
    answer = get(path, Engine(EngineState.FAILED), is_operator=is_operator)
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "engine_dead"
    assert "can't be started any more" in answer.json()["error"]["message"]
    assert "/secret/path" not in answer.text


def test_ready_means_that_requests_are_taken():
    answer = get("/ready", Engine())
    assert (answer.status_code, answer.json()) == (200, {"status": "ready"})


@pytest.mark.parametrize(
    ("state", "draining", "reason"),
    [
        (EngineState.STARTING, False, "is being loaded"),
        (EngineState.RECOVERING, False, "is being started again"),
        (EngineState.FAILED, False, "can't be started any more"),
        (EngineState.CLOSING, False, "about to end"),
        (EngineState.READY, True, "about to end"),
        (EngineState.RECOVERING, True, "about to end"),
    ],
)
def test_not_ready_comes_with_the_reason_and_never_waits_for_the_engine(state, draining, reason):
    engine = Engine(state, answers=False)
    answer = get("/ready", engine, draining=draining)
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "not_ready"
    assert reason in answer.json()["error"]["message"]
    assert int(answer.headers["retry-after"]) >= 1
    assert engine.asked == 0


def test_callers_without_a_key_get_no_reason():
    answer = get("/ready", Engine(), draining=True, is_operator=False)
    assert (answer.status_code, answer.json()["error"]["message"]) == (503, "not ready")
    assert get("/ready", Engine(), is_operator=False).json() == {"status": "ready"}


def test_a_real_server_tells_its_numbers(http):
    before = http.get("/health").json()
    assert before["status"] == "ok"
    assert before["engine"]["num_blocks"] == 512
    assert "times" not in before["engine"]
    http.post("/v1/completions", json={"prompt": "a", "max_tokens": 3}).raise_for_status()
    after = http.get("/health").json()
    assert after["engine"]["num_steps"] >= before["engine"]["num_steps"] + 3
    assert http.get("/ready").json() == {"status": "ready"}


def test_a_server_that_drains_lives_but_is_not_ready():
    with launched(command=list(COMMAND), fake={"step_s": 0.01}) as server:
        assert server.http.get("/ready").status_code == 200
        body = {"prompt": [10, 11], "max_tokens": 10**6, "stream": True}
        with server.http.stream("POST", "/v1/completions", json=body) as stream:
            lines = stream.iter_lines()  # kept: the connection is closed with it
            next(lines)
            server.signal(signal.SIGTERM)
            deadline_s = time.monotonic() + WAIT_S
            while (answer := server.http.get("/ready")).status_code == 200:
                assert time.monotonic() < deadline_s
            assert answer.status_code == 503
            assert "about to end" in answer.json()["error"]["message"]
            assert server.http.get("/health").json()["status"] == "ok"
        assert server.wait_for_exit() == 0
