"""The waits that stalls.py reports are those that there were, and its calls are what it says."""

import json
import socket
import threading
import time
from collections.abc import Callable
from types import ModuleType

import pytest

LoadScript = Callable[[str], ModuleType]


@pytest.fixture
def stalls(load_script: LoadScript) -> ModuleType:
    return load_script("benchmarks.server.stalls")


def test_a_wait_that_goes_on_counts(stalls: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 10.0
    monkeypatch.setattr(stalls.time, "perf_counter", lambda: now_s)
    gaps = stalls.Gaps()
    assert gaps.longest_s() == 0
    with gaps.waiting():
        now_s = 12.0
        assert gaps.longest_s() == 2.0
    now_s = 99.0
    assert gaps.longest_s() == 2.0
    gaps.clear()
    assert gaps.longest_s() == 0


def test_cases_have_the_sizes_in_their_names(stalls: ModuleType) -> None:
    path, body = stalls.CASES["190,000 prompts [1]"][1]()
    assert path == "/v1/completions" and json.loads(body) == {"prompt": [[1]] * 190_000}
    path, body = stalls.CASES["1,024 answers of 180 tokens with 20 logprobs"][1]()
    fields = json.loads(body)
    assert len(fields["prompt"]) * fields["n"] == 1024 and len(body) < 6000
    for num_calls, make in stalls.CASES.values():
        assert num_calls >= 1
        assert len(make()[1]) < 8 << 20, "the server would refuse it for its length"


def test_the_table_has_both_waits_and_the_memory(stalls: ModuleType) -> None:
    mib = 1 << 20
    found = stalls.Found(
        "a call", 200, 1_500_000, 2.0, 1e-3, 0.03, 4e-3, 0.04, 60 * mib, 90 * mib, 61 * mib
    )
    row = stalls.report([found]).splitlines()[-1]
    assert row == "| a call | 200; 1.5; 2.0 | 30 (1) | 40 (4) | 60 -> 90 -> 61 |"


def test_the_prober_waits_for_whole_answers(stalls: ModuleType) -> None:
    """They may come in parts. One that did not would have more and more questions under way."""
    head, body = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n", b"{}"
    received: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        watchers = stalls.Watchers(listener.getsockname())
        prober = threading.Thread(target=watchers._ask)
        prober.start()
        connection, _ = listener.accept()
        with connection:
            for number in range(5):
                received.append(connection.recv(1 << 16))
                connection.sendall(head)
                time.sleep(0.02)  # for one that asks again before the rest is there
                if number == 4:
                    watchers._has_ended.set()
                connection.sendall(body)
            prober.join()
            received.append(connection.recv(1 << 16))
    assert [part.count(b"GET /version") for part in received] == [1, 1, 1, 1, 1, 0]
    assert len(watchers.probe.seconds) == 5
