"""Engines that sleep: over HTTP as vLLM's, and by themselves when no call comes."""

import threading
import time

import ollama
import pytest
from tests.server.launching import SEED, launched

from quire.errors import InvalidRequestError
from quire.server.idle_unload import keep_alive_s

OPTIONS = {"num_blocks": 512, "max_num_seqs": 4, "max_model_len": 4096, "seed": SEED}
PROMPT = {"model": "embedded", "prompt": "import os\n", "max_tokens": 8, "temperature": 0}
LONG = PROMPT | {"max_tokens": 300, "ignore_eos": True}
# No drafts hold in the first answers at this temperature, so they take long enough.
UNFORESEEN = {"temperature": 2.0, "seed": 3}
WAIT_S = 60


@pytest.fixture(scope="module")
def server():
    with launched(OPTIONS) as running:
        yield running


def ask(server, **fields):
    answer = server.http.post("/v1/completions", json=PROMPT | fields)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def is_sleeping(server):
    return server.http.get("/is_sleeping").json()["is_sleeping"]


def control(server, path):
    answer = server.http.post(path)
    assert (answer.status_code, answer.content) == (200, b""), answer.text


@pytest.mark.parametrize("level", [1, 2])
def test_a_sleeping_engine_has_no_model_and_wakes_with_the_same_answers(server, level):
    text, engine = ask(server), server.current_engine()
    control(server, f"/sleep?level={level}")
    control(server, f"/sleep?level={level}")  # has no effect
    assert is_sleeping(server) and not engine.is_running()
    assert server.http.get("/live").status_code == 200
    assert server.http.get("/ready").json()["error"]["message"] == "not ready: the engine sleeps"
    health = server.http.get("/health").json()
    assert (health["status"], health["engine"]) == ("asleep", None)
    assert 'quire_engine_state{state="asleep"} 1.0' in server.http.get("/metrics").text
    assert server.http.get("/api/ps").json() == {"models": []}
    control(server, "/wake_up")
    control(server, "/wake_up")
    assert not is_sleeping(server) and ask(server) == text
    assert server.http.get("/health").json()["num_restarts"] == 0
    assert len(server.http.get("/api/ps").json()["models"]) == 1


def asking(server, found, **fields):
    def run():
        found.append(server.http.post("/v1/completions", json=LONG | fields))

    thread = threading.Thread(target=run)
    thread.start()
    return thread


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_open_requests_end_or_are_waited_for_or_go_on(server, mode):
    wish, found = UNFORESEEN | ({"max_tokens": 3000} if mode == "abort" else {}), []
    if mode != "abort":
        expected = server.http.post("/v1/completions", json=LONG | wish).json()["choices"]
    thread = asking(server, found, **wish)
    server.wait_until(lambda stats: stats["num_running"] == 1)
    control(server, f"/sleep?mode={mode}")
    waiting = []
    later = asking(server, waiting, prompt="def f(")  # waits for the wake-up
    time.sleep(0.2)
    assert not waiting and bool(found) is (mode != "keep")
    control(server, "/wake_up")
    thread.join(WAIT_S)
    later.join(WAIT_S)
    assert waiting[0].status_code == 200
    (answer,) = found
    if mode == "abort":
        assert answer.status_code == 503 and "put to sleep" in answer.text
    else:
        assert answer.json()["choices"] == expected


def test_a_wait_for_open_requests_has_an_end(server):
    wish, found = UNFORESEEN | {"n": 4}, []
    thread = asking(server, found, **wish)
    server.wait_until(lambda stats: stats["num_running"] == 4)
    answer = server.http.post("/sleep?mode=wait&timeout_s=0.001")
    assert answer.status_code == 408 and "open after 0.001 s" in answer.text
    assert not is_sleeping(server) and ask(server)
    thread.join(WAIT_S)
    again = server.http.post("/v1/completions", json=LONG | wish).json()
    assert found[0].json()["choices"] == again["choices"]


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/sleep?level=3", "level"),
        ("/sleep?mode=now", "mode"),
        ("/sleep?mode=wait&timeout_s=inf", "timeout_s"),
        ("/wake_up?tags=weights", "wake up together"),
    ],
)
def test_wishes_that_can_t_be_obeyed_are_refused(server, path, words):
    answer = server.http.post(path)
    assert answer.status_code == 400 and words in answer.text
    assert not is_sleeping(server)


def test_pages_can_t_put_it_to_sleep(server):
    answer = server.http.post("/sleep", headers={"Origin": "https://page.example"})
    assert answer.status_code == 400 and not is_sleeping(server)


def test_a_standby_process_that_dies_is_replaced(server):
    control(server, "/sleep?level=1")
    standby = server.current_engine()
    standby.kill()
    standby.wait(WAIT_S)
    control(server, "/wake_up")
    assert ask(server)


def wait_asleep(server):
    until_s = time.monotonic() + WAIT_S
    while not is_sleeping(server):
        assert time.monotonic() < until_s
        time.sleep(0.02)


def test_an_idle_engine_is_unloaded_and_the_next_call_wakes_it(tmp_path):
    with launched(OPTIONS, idle_unload_s=0.5) as server:
        talker = ollama.Client(host=server.url)
        options = {"num_predict": 4, "temperature": 0}
        talker.generate(model="embedded", keep_alive="1h")  # or it may be unloaded before the next
        awake = talker.generate(model="embedded", prompt="a", options=options)
        assert awake.load_duration == 0
        wait_asleep(server)
        ready = server.http.get("/ready")  # or a load balancer would keep the next call away
        assert (ready.status_code, ready.json()) == (200, {"status": "asleep"})
        woken = talker.generate(model="embedded", prompt="a", options=options)
        assert woken.response == awake.response
        assert 0 < woken.load_duration < woken.total_duration
        # keep_alive keeps it, and unloads it at once.
        talker.generate(model="embedded", keep_alive="1h")
        (model,) = talker.ps().models
        assert 3500 < model.expires_at.timestamp() - time.time() <= 3600
        talker.generate(model="embedded", keep_alive=1e300)
        assert server.http.get("/api/ps").json()["models"][0]["expires_at"].startswith("9999")
        # A call with a key is a tenant's, and the model is there for all.
        with_key = {"headers": {"Authorization": "Bearer some-key"}}
        body = {"model": "embedded", "keep_alive": 0}
        assert server.http.post("/api/generate", json=body, **with_key).status_code == 200
        time.sleep(1.0)
        assert not is_sleeping(server)
        talker.generate(model="embedded", keep_alive=0)
        wait_asleep(server)
        assert talker.ps().models == []
        assert talker.generate(model="embedded", keep_alive="1h").done_reason == "load"
        assert not is_sleeping(server)
        talker._client.close()


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        (0, 0.0),
        (300, 300.0),
        (-1, float("inf")),
        ("5m", 300.0),
        ("1h30m", 5400.0),
        ("1.5s", 1.5),
        ("-1m", float("inf")),
        ("250ms", 0.25),
        ("10", 10.0),
        ("1.s", 1.0),
        (".5s", 0.5),
    ],
)
def test_keep_alive_is_a_duration(value, seconds):
    assert keep_alive_s(value) == seconds


def test_a_long_keep_alive_takes_no_time():
    began_s = time.process_time()
    for text in ("1" * 1_000_000 + "x", "1." * 500_000, "1s" * 500_000):
        with pytest.raises(InvalidRequestError, match="keep_alive"):
            keep_alive_s(text)
    assert time.process_time() - began_s < 2


@pytest.mark.parametrize("value", ["soon", "", "5 minutes", float("nan"), "5x", "1" * 70 + "s"])
def test_other_values_of_keep_alive_are_refused(value):
    with pytest.raises(InvalidRequestError, match="keep_alive"):
        keep_alive_s(value)
