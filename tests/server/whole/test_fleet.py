"""A server with two replicas: what its clients and its operator see of it."""

import json
import os
import signal
import time

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.server.launching import SEED, WAIT_S, launched

OPTIONS = {"seed": SEED, "kv_cache_memory": "32MiB", "max_num_seqs": 16, "max_itl_ratio": 0}


@pytest.fixture(scope="module")
def fleet():
    with launched(OPTIONS, replicas=2) as server:
        yield server


def states(server):
    found = server.http.get("/replicas").raise_for_status().json()["replicas"]
    return {name: each["state"] for name, each in found.items()}


def wait_for(server, wanted):
    deadline_s = time.monotonic() + WAIT_S
    while states(server) != wanted:
        assert time.monotonic() < deadline_s, states(server)
        time.sleep(0.02)


def body(number, **more):
    prompt = f"def function_{number}(path):\n"
    return {"prompt": prompt, "max_tokens": 1500, "ignore_eos": True, "seed": number} | more


def stream(server, number, on_the_way=None):
    """The tokens of one stream; `on_the_way` is called once, when there are 20 or more.

    An event has the tokens of several steps when the API server is slower than the engine, so that
    a count may be skipped.
    """
    found = []
    request = body(number, stream=True, return_token_ids=True, temperature=0.9)
    with server.http.stream("POST", "/v1/completions", json=request) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                assert "error" not in event, event
                found += event["choices"][0].get("token_ids") or ()
                if on_the_way is not None and len(found) >= 20:
                    on_the_way()
                    on_the_way = None
    return found


def samples(server):
    text = server.http.get("/metrics").raise_for_status().text
    return {
        (sample.name, sample.labels.get("replica")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_metrics_have_a_replica_label(fleet):
    wait_for(fleet, {"0": "ready", "1": "ready"})
    stream(fleet, 1)
    found = samples(fleet)
    assert found["quire_engine_up", "0"] == found["quire_engine_up", "1"] == 1
    steps = [found["quire_steps_total", name] for name in "01"]
    assert sum(steps) >= 400 and ("quire_steps_total", None) not in found
    assert found["quire_replica_open_generations", "0"] == 0
    health = fleet.http.get("/health").json()
    assert health["replicas"] == {"0": "ready", "1": "ready"}
    assert health["engine"]["num_steps"] >= sum(steps)
    total = fleet.http.get("/memory?replica=1").json()["total_bytes"]
    assert total == fleet.http.get("/memory").json()["total_bytes"] > 0
    refused = fleet.http.get("/memory?replica=9")
    assert refused.status_code == 400 and "there are: 0, 1" in refused.text


def test_start_message_names_the_single_point_of_failure(fleet):
    printed = "".join(fleet.lines)
    assert "2 replicas" in printed and "the only API server of the replicas" in printed


def test_a_stream_outlives_its_replica_and_has_the_same_tokens(fleet):
    wait_for(fleet, {"0": "ready", "1": "ready"})
    wanted = stream(fleet, 7)
    moved = samples(fleet)["quire_moved_requests_total", None]

    def kill():
        found = fleet.http.get("/replicas").json()["replicas"].values()
        (busy,) = [each["pid"] for each in found if each["num_open"]]
        os.kill(busy, signal.SIGKILL)

    assert len(wanted) == 1500 and stream(fleet, 7, kill) == wanted
    assert samples(fleet)["quire_moved_requests_total", None] == moved + 1
    wait_for(fleet, {"0": "ready", "1": "ready"})


def test_restarts_and_scaling_end_no_stream(fleet):
    wait_for(fleet, {"0": "ready", "1": "ready"})
    wanted = stream(fleet, 8)

    def restart():
        found = fleet.http.get("/replicas").json()["replicas"]
        (busy,) = [name for name, each in found.items() if each["num_open"]]
        answer = fleet.http.post("/replicas/restart", json={"replica": busy})
        assert answer.json() == {"restarted": [busy], "skipped": {}}

    assert stream(fleet, 8, restart) == wanted
    answer = fleet.http.post("/replicas/scale", json={"num_replicas": 1})
    assert list(answer.raise_for_status().json()["replicas"]) == ["0"]
    assert stream(fleet, 8) == wanted
    answer = fleet.http.post("/replicas/scale", json={"num_replicas": 2})
    assert list(answer.json()["replicas"]) == ["0", "1"]
    assert stream(fleet, 8) == wanted


@pytest.mark.parametrize(
    ("path", "sent", "says"),
    [
        ("/replicas/scale", {"num_replicas": 0}, "from 1 to"),
        ("/replicas/restart", {"replica": "9"}, "there are: 0, 1"),
        ("/replicas/restart", {"timeout_s": -1}, "timeout_s is -1"),
        ("/replicas/restart", {"name": "0"}, "name"),
    ],
)
def test_invalid_replica_calls_are_refused_by_name(fleet, path, sent, says):
    answer = fleet.http.post(path, json=sent)
    assert answer.status_code == 400 and says in answer.text


def test_one_engine_alone_has_no_replicas(http):
    answer = http.get("/replicas")
    assert answer.status_code == 400 and "--replicas" in answer.text
