"""A server's life as a process: how it starts, how it ends, and that nothing stays behind."""

import json
import os
import signal
import socket
import subprocess
import sys

import httpx
import psutil
import pytest
from tests.engine.fake_engine_process import COMMAND as FAKE
from tests.server.launching import WAIT_S, launched

from quire.errors import CheckpointError, ConfigurationError
from quire.server.launch import ServerConfig, _url, serve

WISH = {"prompt": [10], "stream": True}


def words(response):
    """The JSON of a stream's events, [DONE] included as a string."""
    for line in response.iter_lines():
        if line:
            data = line.removeprefix("data: ")
            yield data if data == "[DONE]" else json.loads(data)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_drains_open_streams_and_leaves_no_process(number):
    with launched(command=FAKE, fake={"step_s": 0.02}) as server:
        wish = WISH | {"max_tokens": 100}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=wish) as response:
            events = words(response)
            next(events)
            server.signal(number)
            server.wait_for_line("waiting for 1 open answers")
            with pytest.raises(httpx.ConnectError):
                while True:  # the listener closes a moment later
                    httpx.get(f"{server.url}/health")
            rest = list(events)
        assert rest[-1] == "[DONE]"
        assert rest[-2]["choices"][0]["finish_reason"] == "length"
        assert server.wait_for_exit() == 0
        assert "Traceback" not in server.output()


def test_a_second_signal_ends_open_streams_at_once():
    with launched(command=FAKE, fake={"step_s": 0.02}) as server:
        endless = WISH | {"max_tokens": 10**6}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=endless) as response:
            events = words(response)
            next(events)
            server.signal(signal.SIGINT)
            server.wait_for_line("waiting for")
            server.signal(signal.SIGINT)
            assert server.wait_for_exit() == 0
        assert "Traceback" not in server.output()


def test_draining_has_a_bound():
    with launched(command=FAKE, fake={"step_s": 0.02}, drain_timeout_s=1) as server:
        endless = WISH | {"max_tokens": 10**6}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=endless) as response:
            events = words(response)
            next(events)
            server.signal(signal.SIGINT)
            assert server.wait_for_exit() == 0


def test_a_signal_while_the_model_loads_ends_it():
    with launched(command=FAKE, fake={"hang_s": 600}, wait=False) as server:
        process = psutil.Process(server.process.pid)
        while not (children := process.children()):
            assert server.process.poll() is None
        server.engine = children[0]
        server.signal(signal.SIGINT)
        assert server.wait_for_exit() == 0
        assert "Traceback" not in server.output()


def test_when_the_server_is_killed_the_engine_ends_itself():
    with launched(command=FAKE, fake={"step_s": 0.01}) as server:
        endless = WISH | {"max_tokens": 10**6}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=endless) as response:
            events = words(response)
            next(events)
            server.signal(signal.SIGKILL)
            assert server.wait_for_exit() == -signal.SIGKILL


def test_the_real_engine_ends_itself_when_the_server_is_killed():
    with launched({"num_blocks": 64}) as server:
        server.signal(signal.SIGKILL)
        assert server.wait_for_exit() == -signal.SIGKILL


def test_when_the_engine_dies_streams_end_with_an_error_and_health_fails():
    with launched(command=FAKE, fake={"step_s": 0.01}) as server:
        endless = WISH | {"max_tokens": 10**6}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=endless) as response:
            events = words(response)
            next(events)
            os.kill(server.engine.pid, signal.SIGKILL)
            *_, error, last = events
        assert last == "[DONE]"
        assert "SIGKILL" in error["error"]["message"]
        for answer in (
            httpx.get(f"{server.url}/health"),
            httpx.post(f"{server.url}/v1/completions", json={"prompt": [10]}),
        ):
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "engine_dead"
        server.signal(signal.SIGINT)
        assert server.wait_for_exit() == 0


def test_too_many_open_requests_are_told_to_come_again():
    with launched(command=FAKE, fake={"step_s": 0.01}, max_queued_requests=2) as server:
        url = f"{server.url}/v1/completions"
        endless = WISH | {"max_tokens": 10**6, "n": 2}
        with httpx.stream("POST", url, json=endless) as response:
            events = words(response)
            next(events)
            refused = httpx.post(url, json={"prompt": [10]})
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["type"] == "rate_limit_error"
        server.wait_until(lambda stats: stats["num_held_blocks"] == 0)
        assert httpx.post(url, json={"prompt": [10], "max_tokens": 2}).status_code == 200


def test_it_tells_its_address_and_a_command_that_works():
    with launched(command=FAKE, served_model_name="mine") as server:
        server.wait_for_line("curl")
        last = server.wait_for_line("-d '")
        body = json.loads(last.string.split("-d '")[1].rstrip().rstrip("'"))
        assert body["model"] == "mine"
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=WAIT_S)
        assert answer.status_code == 200
        assert answer.json()["model"] == "mine"


def test_a_port_that_is_taken_is_told_before_the_model_is_loaded():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigurationError, match=f"port {port} of 127.0.0.1 is in use"):
            serve({"model": "/no/such/model"}, ServerConfig(port=port))


def test_a_host_that_is_not_ours_is_told():
    with pytest.raises(ConfigurationError, match=r"host is 'not\.a\.host\.invalid'"):
        serve({}, ServerConfig(host="not.a.host.invalid", port=0))
    with pytest.raises(ConfigurationError, match=r"can't listen on 192\.0\.2\.1"):
        serve({}, ServerConfig(host="192.0.2.1", port=0))


@pytest.mark.parametrize(
    ("options", "kind", "reason"),
    [
        ({"modle": "x"}, ConfigurationError, "did you mean model"),
        ({"block_size": 3}, ConfigurationError, "block_size is 3"),
        ({"skip_tokenizer_init": True}, ConfigurationError, "the server needs the tokenizer"),
        ({"tokenizer": "."}, CheckpointError, r"no tokenizer\.json"),
        ({"num_blocks": 10**12}, ConfigurationError, "GiB"),
    ],
)
def test_options_that_cannot_be_obeyed_are_refused(options, kind, reason):
    before = psutil.Process().children()
    with pytest.raises(kind, match=reason):
        serve(options, ServerConfig(port=0))
    assert psutil.Process().children() == before


@pytest.mark.parametrize(
    ("field", "value"), [("port", -1), ("port", 65536), ("max_queued_requests", 0)]
)
def test_a_server_config_names_the_field_at_fault(field, value):
    with pytest.raises(ConfigurationError, match=f"{field} is {value}"):
        ServerConfig(**{field: value})


def test_urls_are_ones_that_a_client_can_use():
    assert _url("0.0.0.0", 80) == "http://127.0.0.1:80"
    assert _url("::", 80) == "http://[::1]:80"
    assert _url("example.org", 8000) == "http://example.org:8000"


def test_the_server_imports_no_torch():
    program = (
        "import sys, quire.server.app, quire.server.launch, quire.engine.async_engine;"
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=WAIT_S).returncode == 0
