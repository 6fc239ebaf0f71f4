"""A crowd of clients and the worst of neighbours on one real server, for a few seconds.

`benchmarks/server/clients.py` does the same for a minute with 500 of them.
"""

import asyncio

import httpx
import psutil
import pytest
from benchmarks.server.crowd import CrowdPlan, run_crowd
from tests.engine_client.fake_engine_process import COMMAND as FAKE
from tests.server.launching import WAIT_S, launched

OPTIONS = {"num_blocks": 1024, "max_num_seqs": 32, "max_model_len": 1024}
NUM_CLIENTS = 60
MAX_GROWTH_BYTES = 96 << 20


def address(server):
    host, port = server.url.removeprefix("http://").split(":")
    return host, int(port)


def is_idle(stats):
    return stats["num_running"] == stats["num_waiting"] == stats["num_held_blocks"] == 0


@pytest.fixture(scope="module")
def busy_server():
    with launched(OPTIONS, keep_alive_s=0.5) as running:
        yield running


def run(server, **plan):
    plan = CrowdPlan(*address(server), duration_s=2.0, answer_limit_s=WAIT_S, **plan)
    return asyncio.run(run_crowd(plan))


def test_bad_neighbours_harm_no_client_and_leave_nothing(busy_server):
    processes = [psutil.Process(busy_server.process.pid), busy_server.engine]
    before = [process.memory_info().rss for process in processes]
    tally = run(
        busy_server,
        num_clients=NUM_CLIENTS,
        min_tokens=8,
        max_tokens=24,
        never_read=3,
        slow_read=2,
        slow_body=3,
        slow_head=3,
        vanish=6,
    )
    assert not tally.problems
    assert (tally.num_stuck, tally.num_refused) == (0, 0)
    assert tally.num_answers >= NUM_CLIENTS
    assert tally.happenings["vanish"] > 6  # they came again and again
    busy_server.wait_until(is_idle)
    after = [process.memory_info().rss for process in processes]
    for now, then in zip(after, before, strict=True):
        assert now - then < MAX_GROWTH_BYTES


def test_keep_alives_bridge_slow_steps():
    slow = {"step_s": 0.3}
    with launched(command=FAKE, fake=slow, keep_alive_s=0.05) as server:
        wish = {"prompt": [10], "max_tokens": 3, "stream": True}
        with httpx.stream(
            "POST", f"{server.url}/v1/completions", json=wish, timeout=WAIT_S
        ) as response:
            text = response.read().decode()
    events = [event for event in text.split("\n\n") if event]
    assert events[0] == ": keep-alive"  # the head did not wait for the first token
    assert events[-1] == "data: [DONE]"
    assert events.count(": keep-alive") >= 3
    assert sum('"choices"' in event for event in events) == 3
