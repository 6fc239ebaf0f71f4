"""A server of several models: the embedded model under several names, in room for one and a half.

Each name has an engine process of its own, whose options differ.
"""

import concurrent.futures
import contextlib
import json
import signal
import time

import pytest
from tests.server.launching import WAIT_S, launched

MIB = 1 << 20
MEMORY = 64 * MIB
KEYS = ("alice:alice-key-1", "bob:bob-key-1 models=b", "operator:operator-key-1")
ALICE, BOB, OPERATOR = (
    {"Authorization": f"Bearer {name}-key-1"} for name in ("alice", "bob", "operator")
)


def entries(folder):
    return [
        {"names": ["a", "first"], "memory_bytes": MEMORY},
        {"names": ["b"], "memory_bytes": MEMORY, "engine_options": {"max_model_len": 512}},
        {"names": ["wrong"], "engine_options": {"model": str(folder / "missing")}},
    ]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    models = entries(tmp_path_factory.mktemp("models"))
    options = {"models_file": "models.yaml", "models_memory": MEMORY * 3 // 2, "api_keys": KEYS}
    with launched(models=models, models_keep_processes=True, **options) as running:
        running.http.headers.update(ALICE)
        yield running


def complete(server, model, **fields):
    body = {"prompt": "def f", "max_tokens": 4, "seed": 1} | fields
    return server.http.post("/v1/completions", json=body | ({"model": model} if model else {}))


def states(server):
    return {each["id"]: each["state"] for each in server.http.get("/v1/models").json()["data"]}


def wait_for(condition):
    deadline_s = time.monotonic() + WAIT_S
    while not (found := condition()):
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    return found


def test_models_are_loaded_by_their_first_calls_and_give_way_to_each_other(server):
    assert set(states(server)) == {"a", "first", "b", "wrong"}
    first = complete(server, None).json()
    assert first["model"] == "a"
    assert complete(server, "first").json()["choices"] == first["choices"]
    assert (states(server)["a"], states(server)["b"]) == ("loaded", "unloaded")
    assert complete(server, "b").json()["choices"] == first["choices"]
    assert (states(server)["a"], states(server)["b"]) == ("unloaded", "loaded")
    cards = {each["id"]: each for each in server.http.get("/v1/models").json()["data"]}
    assert (cards["a"]["max_model_len"], cards["b"]["max_model_len"]) == (4096, 512)
    assert cards["wrong"]["max_model_len"] is None


def test_no_call_is_lost_while_two_models_share_room_for_one_and_a_half(server):
    def ask(number):
        return complete(server, "ab"[number % 2], max_tokens=8, seed=number // 2)

    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        found = list(pool.map(ask, range(60)))
    assert [each.status_code for each in found] == [200] * 60
    texts = [each.json()["choices"][0]["text"] for each in found]
    assert texts[::2] == texts[1::2]  # the same weights and seeds, in two engines


def test_a_wrong_model_fails_alone_and_only_the_operator_learns_why(server):
    refused = complete(server, "wrong")
    assert refused.status_code == 503
    assert int(refused.headers["retry-after"]) >= 1
    error = refused.json()["error"]
    assert error["code"] == "model_load_failed"
    assert "missing" not in error["message"]
    own = server.http.get("/health", headers=OPERATOR).json()["models"]["wrong"]
    assert own["state"] == "failed"
    assert "missing' is not a folder here" in own["error"]
    assert complete(server, "b").status_code == 200
    unknown = complete(server, "other")
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "model_not_found")


def test_a_key_may_be_limited_to_some_models(server):
    listed = server.http.get("/v1/models", headers=BOB).json()["data"]
    assert [each["id"] for each in listed] == ["b"]
    body = {"prompt": "x", "max_tokens": 1}
    for fields, status in (({}, 200), ({"model": "b"}, 200), ({"model": "a"}, 404)):
        answer = server.http.post("/v1/completions", json=body | fields, headers=BOB)
        assert answer.status_code == status, answer.text
    assert [each["name"] for each in _ollama(server, "/api/tags", BOB)] == ["b"]
    for name in ("a", "other"):
        pulled = server.http.post("/api/pull", json={"model": name}, headers=BOB)
        assert pulled.status_code == 403, pulled.text
    assert server.http.get("/tokenizer_info", headers=BOB).status_code == 200
    assert complete(server, "a").status_code == 200  # now `b` is not in memory, but `a` is
    hidden = server.http.get("/tokenizer_info", headers=BOB)
    assert hidden.status_code == 503 and "'b' is un" in hidden.text


def _ollama(server, path, headers=ALICE):
    return server.http.get(path, headers=headers).json()["models"]


def test_the_operator_loads_and_unloads_one_model_in_ollamas_way(server):
    loading = {"model": "a:latest", "prompt": "", "stream": False}
    answer = server.http.post("/api/generate", json=loading, headers=OPERATOR)
    assert answer.json()["done_reason"] == "load"
    assert [each["name"] for each in _ollama(server, "/api/ps")] == ["a"]
    unloading = {"model": "a", "prompt": "", "stream": False, "keep_alive": 0}
    for headers in (ALICE, OPERATOR):  # that of a tenant has no effect
        answer = server.http.post("/api/generate", json=unloading, headers=headers)
        assert answer.json()["done_reason"] == "unload"
        assert _ollama(server, "/api/ps") or headers is OPERATOR
    wait_for(lambda: states(server)["a"] == "unloaded")
    assert server.http.post("/api/generate", json=unloading).status_code == 200
    assert states(server)["a"] == "unloaded"  # that call loads nothing
    shown = server.http.post("/api/show", json={"model": "a"}).json()
    assert shown["model_info"]["quire.context_length"] == 4096


def test_the_operators_endpoints_name_a_model(server):
    assert complete(server, "b").status_code == 200
    http, ask = server.http, {"headers": OPERATOR}
    assert http.get("/memory?model=b", **ask).json()["total_bytes"] < MEMORY
    refused = http.get("/memory?model=a", **ask)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "model_not_loaded")
    assert http.get("/is_sleeping?model=a", **ask).json() == {"is_sleeping": True}
    assert http.post("/wake_up?model=a", **ask).status_code == 200
    assert (states(server)["a"], states(server)["b"]) == ("loaded", "unloaded")
    assert http.post("/sleep?model=a", **ask).status_code == 200
    assert states(server)["a"] == "unloaded"
    assert http.get("/ready").json() == {"status": "ready"}


def test_the_operator_watches_models_without_loading_them(server):
    assert complete(server, "b").status_code == 200
    ask = {"headers": OPERATOR}
    loads = {}
    for path in ("/stats", "/stats?model=b", "/stats?model=first", "/stats?model=wrong"):
        found = server.http.get(path, **ask).raise_for_status().json()
        models = {each["name"]: each for each in found["models"]}
        loads[path] = [each["num_loads"] for each in models.values()]
        is_b = path.endswith("=b")
        assert found["model"] == {"/stats?model=wrong": "wrong"}.get(path, "b" if is_b else "a")
        assert (found["state"] == "ready") == bool(found["engines"]) == is_b
        assert bool(found["finished"]) == bool(found["tenants"]) == (found["model"] != "wrong")
        assert found["num_open_calls"] >= 1  # this one
    assert len(set(map(tuple, loads.values()))) == 1
    assert (models["a"]["state"], models["b"]["state"]) == ("unloaded", "loaded")
    assert models["a"]["memory_bytes"] == 0 < models["b"]["memory_bytes"] <= MEMORY
    assert 0 <= models["b"]["unused_s"] < models["a"]["unused_s"]
    assert found["models_memory_bytes"] == MEMORY * 3 // 2
    assert server.http.get("/stats?model=none", **ask).status_code == 404


def test_a_stream_of_a_model_shows_its_engine_once_it_is_loaded(server):
    assert complete(server, "a").status_code == 200
    ask = {"headers": OPERATOR, "params": {"model": "b", "interval": "0.25"}}
    seen = []
    with server.http.stream("GET", "/stats/events", **ask) as stream:
        for line in stream.iter_lines():
            if not line.startswith("data: "):
                continue
            seen.append(json.loads(line.removeprefix("data: ")))
            if len(seen) == 1:
                assert complete(server, "b").status_code == 200
            if seen[-1]["engines"]:
                break
    assert (seen[0]["engines"], seen[0]["state"]) == ([], "unloaded")
    assert "facts" in seen[-1]["engines"][0] and seen[-1]["state"] == "ready"


def test_metrics_have_the_model_in_a_label(server):
    assert complete(server, "b").status_code == 200
    text = server.http.get("/metrics", headers=OPERATOR).text
    lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if line[0] != "#")
    assert lines['quire_engine_up{model_name="b"}'] == "1.0"
    assert float(lines['quire_generation_tokens_total{model_name="b",tenant="alice"}']) > 0
    assert float(lines['quire_model_loads_total{model_name="a"}']) >= 2
    assert lines['quire_model_state{model_name="wrong",state="failed"}'] == "1.0"
    assert float(lines['quire_model_memory_bytes{model_name="b"}']) <= MEMORY
    assert 'vllm:num_requests_running{engine="0",model_name="b"}' in lines


def test_a_dead_engine_leaves_the_streams_of_another_model_alone(tmp_path):
    models = entries(tmp_path)[:2]
    with launched(models=models, models_file="models.yaml", models_memory=3 * MEMORY) as server:
        for name in ("a", "b"):
            assert complete(server, name).status_code == 200
        engines = sorted(server._engines(), key=lambda each: each.create_time())
        assert len(engines) == 2
        wish = {"prompt": "def f", "max_tokens": 400, "seed": 1, "ignore_eos": True}
        wish["temperature"] = 2.0  # few drafts hold, so the streams last until the kill
        whole = server.http.post("/v1/completions", json=wish | {"model": "b"}).json()
        wish |= {"stream": True}
        with contextlib.ExitStack() as streams:
            texts = [
                streams.enter_context(
                    server.http.stream("POST", "/v1/completions", json=wish | {"model": name})
                ).iter_lines()
                for name in ("a", "b")
            ]
            for lines in texts:
                next(lines)
            engines[0].send_signal(signal.SIGKILL)  # that of `a`
            found = ["".join(_pieces(lines)) for lines in texts]
        expected = whole["choices"][0]["text"]
        assert expected.endswith(found[1])
        assert expected.endswith(found[0])  # continued by the engine's next process

        def num_restarts():
            health = server.http.get("/health").json()["models"]
            return [health[name]["num_restarts"] for name in ("a", "b")]

        wait_for(lambda: num_restarts() == [1, 0])


def _pieces(lines):
    for line in lines:
        if line.startswith("data: {"):
            choice = json.loads(line.removeprefix("data: "))["choices"][0]
            yield choice["text"]
