"""A server's life as a process: how it starts, how it ends, and that nothing stays behind."""

import asyncio
import contextlib
import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from dataclasses import replace

import httpx
import psutil
import pytest
from tests.embedded_gguf import write_embedded_gguf
from tests.engine_client.fake_engine_process import COMMAND as FAKE
from tests.server.launching import WAIT_S, launched

from quire.errors import CheckpointError, ConfigurationError
from quire.hub.found_model import FoundModel
from quire.hub.model_folder import EMBEDDED_MODEL
from quire.server import model_launch
from quire.server.config import ServerConfig
from quire.server.launch import _return_memory, _say, _url, serve
from quire.server.model_launch import make_plan

WISH = {"prompt": [10], "stream": True}


def words(response):
    """The JSON of a stream's events, [DONE] included as a string."""
    for line in response.iter_lines():
        if line and not line.startswith(":"):  # a comment keeps the connection open
            data = line.removeprefix("data: ")
            yield data if data == "[DONE]" else json.loads(data)


def test_a_signal_drains_open_streams_and_leaves_no_process():
    """SIGTERM does in the next test."""
    with launched(command=FAKE, fake={"step_s": 0.02}, is_forked=False) as server:
        wish = WISH | {"max_tokens": 250}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=wish) as response:
            events = words(response)
            next(events)
            server.signal(signal.SIGINT)
            server.wait_for_line(
                "draining: 1 answer is open .* a second Ctrl-C ends the server at once"
            )
            refused = httpx.post(f"{server.url}/v1/completions", json={"prompt": [10]})
            assert refused.status_code == 503
            assert int(refused.headers["retry-after"]) >= 1
            assert refused.json()["error"]["code"] == "server_draining"
            assert httpx.get(f"{server.url}/health").status_code == 200
            assert httpx.get(f"{server.url}/ready").status_code == 503
            rest = list(events)
        assert rest[-1] == "[DONE]"
        assert rest[-2]["choices"][0]["finish_reason"] == "length"
        assert server.wait_for_exit() == 0
        assert "Traceback" not in server.output()


def test_with_json_logs_every_line_on_stderr_is_an_object():
    """Once the server is up nothing goes to stdout; both come in one stream here."""
    with launched(command=FAKE, fake={"step_s": 0.02}, log_format="json") as server:
        wish = WISH | {"max_tokens": 100}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=wish) as response:
            events = words(response)
            next(events)
            server.signal(signal.SIGTERM)
            server.wait_for_line("draining: 1 answer")
            assert list(events)[-1] == "[DONE]"
        assert server.wait_for_exit() == 0
        printed = server.output().partition("Ctrl-C ends it")[2]
    lines = [json.loads(line) for line in printed.splitlines() if line.startswith("{")]
    assert any(line["message"].startswith("draining: 1 answer is open") for line in lines)
    others = [line for line in printed.splitlines()[1:] if not line.startswith(("{", "  "))]
    assert others == []  # the call to try, two indented lines of stdout, aside


def test_a_second_signal_ends_open_streams_at_once():
    with launched(command=FAKE, fake={"step_s": 0.02}) as server:
        endless = WISH | {"max_tokens": 10**6}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=endless) as response:
            events = words(response)
            next(events)
            server.signal(signal.SIGINT)
            server.wait_for_line("draining: 1 answer")
            server.signal(signal.SIGINT)
            assert server.wait_for_exit() == 0
        assert "Traceback" not in server.output()


def test_after_the_bound_open_streams_end_with_an_error():
    with launched(command=FAKE, fake={"step_s": 0.02}, drain_timeout_s=1) as server:
        endless = WISH | {"max_tokens": 10**6}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=endless) as response:
            events = words(response)
            next(events)
            server.signal(signal.SIGTERM)
            *_, error, last = events
        assert error["error"]["code"] == "server_draining"
        assert last == "[DONE]"
        server.wait_for_line("1 answers were open after 1 s; they end with an error")
        assert server.wait_for_exit() == 0


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_a_signal_while_the_model_loads_ends_it(number, code):
    with launched(command=FAKE, fake={"hang_s": 600}, wait=False, is_forked=False) as server:
        process = psutil.Process(server.process.pid)
        while not process.children():
            assert server.process.poll() is None
        server.signal(number)
        assert server.wait_for_exit() == code
        assert server.output() == f"{number.name} while the model was loading; the server ends\n"


def test_when_the_server_is_killed_the_engine_ends_itself():
    with launched({"num_blocks": 64, "max_model_len": 1024}, is_forked=False) as server:
        endless = WISH | {"max_tokens": 1000, "ignore_eos": True}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=endless) as response:
            events = words(response)
            next(events)
            server.signal(signal.SIGKILL)
            assert server.wait_for_exit() == -signal.SIGKILL


def test_when_the_engine_has_failed_for_good_the_server_ends_and_says_why():
    with launched(command=FAKE, fake={"step_s": 0.01}, max_engine_restarts=0) as server:
        endless = WISH | {"max_tokens": 10**6}
        with httpx.stream("POST", f"{server.url}/v1/completions", json=endless) as response:
            events = words(response)
            next(events)
            os.kill(server.engine.pid, signal.SIGKILL)
            *_, error, last = events
        assert last == "[DONE]"
        assert error["error"]["code"] == "engine_dead"
        assert "failed for good" in error["error"]["message"]
        assert server.wait_for_exit() == 1
        printed = server.output()
        assert "quire: error: " in printed and "SIGKILL" in printed
        assert "died more than 0 times within 300 s" in printed
        assert "Traceback" not in printed


def test_each_option_of_the_server_reaches_the_part_that_keeps_it():
    options = {
        "max_prompts": 2,
        "max_n": 3,
        "max_choices": 4,
        "max_stop_strings": 1,
        "max_list_length": 1,
        "max_body_bytes": 1000,
        "max_tenant_requests": 3,
        "default_deadline_s": 0.8,
        "allowed_origins": ["https://a.example"],
    }
    cases = [
        ({"prompt": [[10]] * 3}, 400, "bound of 2"),
        ({"prompt": [10], "n": 4}, 400, "3"),
        ({"prompt": [[10], [11]], "n": 3}, 400, "4"),
        ({"prompt": [10], "stop": ["a", "b"]}, 400, "bound of 1"),
        ({"prompt": [10], "stop_token_ids": [1, 2]}, 400, "bound of 1"),
        ({"prompt": "x" * 1000}, 413, "1000 bytes"),
        ({"prompt": [[10], [11]], "n": 2}, 400, "may have 3 open at once"),
        ({"prompt": [10], "max_tokens": 400}, 408, "0.8"),
    ]
    with launched(command=FAKE, fake={"step_s": 0.02}, **options) as server:
        for body, status, expected in cases:
            answer = server.http.post("/v1/completions", json=body)
            assert (answer.status_code, expected in answer.text) == (status, True), answer.text
        origin = {"Origin": "https://a.example"}
        answer = server.http.get("/v1/models", headers=origin)
        assert answer.headers["access-control-allow-origin"] == origin["Origin"]
        assert answer.headers["x-content-type-options"] == "nosniff"


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


WARNING = "Anyone who can reach this machine"


def test_it_tells_its_address_and_a_command_that_works():
    with launched(command=FAKE, served_model_name=["mine", "other"], host="0.0.0.0") as server:
        server.wait_for_line("curl")
        last = server.wait_for_line("-d '")
        body = json.loads(last.string.split("-d '")[1].rstrip().rstrip("'"))
        assert body["model"] == "mine"
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=WAIT_S)
        assert answer.status_code == 200
        assert answer.json()["model"] == "mine"
        body["model"] = "other"
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=WAIT_S)
        assert answer.json()["model"] == "other"
        models = server.http.get("/v1/models").json()["data"]
        assert [model["id"] for model in models] == ["mine", "other"]
        assert WARNING in "".join(server.lines)


def test_with_keys_the_command_has_a_place_for_one_and_without_answers_it_ends_at_once():
    with launched(command=FAKE, api_keys=["alice:alice-key-1"], host="0.0.0.0") as server:
        server.wait_for_line("Authorization: Bearer YOUR_KEY")
        assert server.http.get("/health").status_code == 200
        assert server.http.get("/v1/models").status_code == 401
        server.signal(signal.SIGINT)
        server.wait_for_line("draining: no answer is open; the server ends")
        assert server.wait_for_exit() == 0
        assert WARNING not in server.output(), "those without a key are refused"


def test_it_tells_what_it_loaded_and_where_the_memory_goes(server):
    printed = "".join(server.lines)
    assert WARNING not in printed, "others reach no port of localhost"
    assert "embedded (" in printed and "M parameters)" in printed
    assert "512 blocks of 16 tokens: 8 concurrent requests of 1024 tokens" in printed
    assert "  weights " in printed and "  KV cache " in printed


def test_a_port_that_is_taken_is_told_before_the_model_is_loaded():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigurationError, match=f"port {port} of 127.0.0.1 is in use"):
            serve({"model": "/no/such/model"}, ServerConfig(port=port))


def test_an_unusable_host_is_reported():
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
        ({"max_logprobs": -2}, ConfigurationError, "max_logprobs is -2"),
    ],
)
def test_options_that_cannot_be_obeyed_are_refused(options, kind, reason):
    before = psutil.Process().children()
    with pytest.raises(kind, match=reason):
        serve(options, ServerConfig(port=0))
    assert psutil.Process().children() == before


@pytest.mark.parametrize(
    ("server", "reason"),
    [
        ({"api_keys": ("short",)}, "API key 1"),
        ({"api_key_file": "/no/such/file"}, "/no/such/file"),
        ({"allowed_origins": ("https://a.example/",)}, "allowed_origins has 'https://a.example/'"),
        ({"max_n": 10**6}, "max_n is 1000000"),
        ({"max_stop_strings": 65}, "max_stop_strings is 65"),
        ({"otlp_endpoint": "nowhere"}, "nowhere"),
        ({"record": "/no/such/folder/load"}, "record names /no/such/folder/load, but No such file"),
        ({"record_time_ms": 9}, "record_time_ms is 9, but nothing is recorded"),
    ],
)
def test_a_server_that_cannot_be_is_refused_before_the_model_is_loaded(server, reason):
    before = psutil.Process().children()
    with pytest.raises(ConfigurationError, match=reason):
        serve({}, ServerConfig(port=0, **server))
    assert psutil.Process().children() == before


@pytest.mark.parametrize(("given", "expected"), [({}, None), ({"seed": 0}, 0), ({"seed": 7}, 7)])
def test_seeds_of_unseeded_requests_repeat_only_if_that_was_asked_for(given, expected):
    plan = make_plan(given, ServerConfig())
    assert plan.server_seed == expected


def test_urls_are_ones_that_a_client_can_use():
    assert _url("0.0.0.0", 80) == "http://127.0.0.1:80"
    assert _url("::", 80) == "http://[::1]:80"
    assert _url("example.org", 8000) == "http://example.org:8000"


def test_the_server_imports_no_torch():
    program = (
        "import sys, quire.server.app, quire.server.launch, quire.engine_client.one_engine;"
        "quire.server.app.all_endpoints();"
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'numpy')))"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=WAIT_S).returncode == 0


@pytest.mark.skipif(
    not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="another C library keeps no free memory"
)
def test_memory_that_long_calls_have_left_free_goes_back(monkeypatch):
    """Between blocks that are still in use, too, which the C library alone would never return."""
    monkeypatch.setattr("quire.server.launch._TRIM_PERIOD_S", 0.01)
    process = psutil.Process()
    blocks = [bytes([1]) * 4000 for _ in range(16_000)]
    in_use = blocks[::50]
    blocks.clear()
    left_bytes = process.memory_info().rss

    async def wait_until_it_is_returned():
        trim = asyncio.create_task(_return_memory())
        async with asyncio.timeout(WAIT_S):
            while process.memory_info().rss > left_bytes - (32 << 20):
                await asyncio.sleep(0.01)
        trim.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await trim

    asyncio.run(wait_until_it_is_returned())
    assert len(in_use) == 320


def test_a_line_that_cannot_be_written_ends_nothing():
    with open("/dev/full", "w") as full:
        _say("lost", full)
        _say("lost as well", full)  # and closing it, which flushes, raises nothing either


def test_a_gguf_file_is_served_by_its_stem_with_its_own_tokenizer_and_template(tmp_path):
    path = write_embedded_gguf(tmp_path / "tiny-BF16.gguf")
    plan = make_plan({"model": str(path)}, ServerConfig())
    assert plan.model_names == ("tiny-BF16",)
    assert (plan.options.model, plan.options.revision) == (str(path), None)
    assert plan.files.chat_template.exists
    folder = make_plan({}, ServerConfig()).files.tokenizer
    assert plan.files.tokenizer.encode("def f(x):") == folder.encode("def f(x):")
    named = make_plan({"model": str(path)}, ServerConfig(served_model_name=("mine",)))
    assert named.model_names == ("mine",)


def test_engine_fetches_missing_weights_of_the_pinned_revision(monkeypatch, tmp_path):
    shutil.copytree(EMBEDDED_MODEL, tmp_path / "snapshot")
    found = FoundModel(tmp_path / "snapshot", has_weights=False, revision="abc")
    monkeypatch.setattr(model_launch, "find_model", lambda *name, **_: found)
    plan = make_plan({"model": "org/model", "revision": "main"}, ServerConfig())
    assert (plan.options.model, plan.options.revision) == ("org/model", "abc")
    assert plan.model_names == ("org/model",)
    monkeypatch.setattr(
        model_launch, "find_model", lambda *name, **_: replace(found, has_weights=True)
    )
    plan = make_plan({"model": "org/model", "revision": "main"}, ServerConfig())
    assert (plan.options.model, plan.options.revision) == (str(tmp_path / "snapshot"), None)
