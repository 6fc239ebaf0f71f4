"""A server that serves imports no module: it may have no file descriptor left for that."""

from tests.engine_client.fake_engine_process import COMMAND
from tests.server import launching
from tests.server.launching import launched

HOOK = """
import os, sys
from quire.server import launch

serving = []

def note(event, details):
    if serving and event == "import":
        os.write(1, f"imported {details[0]}\\n".encode())

startup = launch._HTTPServer.startup

async def note_startup(server, sockets=None):
    await startup(server, sockets)
    serving.append(True)

launch._HTTPServer.startup = note_startup
sys.addaudithook(note)
"""

CALLS = [
    ("GET", path, None)
    for path in (
        *("/openapi.json", "/docs", "/health", "/ready", "/metrics", "/memory", "/version"),
        *("/v1/models", "/v1/models/embedded", "/v1/models/none", "/tokenizer_info", "/nothing"),
        *("/", "/live", "/api/tags", "/api/ps", "/api/version", "/replicas", "/v1/responses/none"),
    )
]
CALLS += [
    ("POST", path, body | {"stream": stream})
    for path, body in {
        "/v1/completions": {"prompt": [10], "max_tokens": 2},
        "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2},
        "/v1/messages": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2},
        "/v1/responses": {"input": "a", "max_output_tokens": 2},
        "/api/chat": {
            "messages": [{"role": "user", "content": "a"}],
            "options": {"num_predict": 2},
        },
        "/api/generate": {"prompt": "a", "options": {"num_predict": 2}},
        "/api/pull": {},
    }.items()
    for stream in (False, True)
]
CALLS += [
    ("POST", "/tokenize", {"prompt": "a" * 100_000}),
    ("POST", "/detokenize", {"tokens": [10]}),
    ("POST", "/v1/completions", {"prompt": "\U0001f600" * 20_000}),
    ("POST", "/v1/completions", {"wrong": 1}),
    ("DELETE", "/v1/responses/none", None),
]


def test_no_call_makes_a_server_import_a_module(monkeypatch):
    monkeypatch.setattr(launching, "PROGRAM", HOOK + launching.PROGRAM)
    with launched(command=list(COMMAND), fake={"step_s": 0.001}, is_forked=False) as server:
        for method, path, body in CALLS:
            answer = server.http.request(method, path, json=body)
            assert answer.status_code < 500, (path, answer.text)
        for raw in (b"\xef\xbb\xbf{}", b"\xff", b"[" * 3000, b"{"):
            headers = {"Content-Type": "application/json"}
            answer = server.http.post("/v1/completions", content=raw, headers=headers)
            assert answer.status_code == 400
        text = server.http.get("/metrics", headers={"Accept": "application/openmetrics-text"})
        assert text.status_code == 200
        server.process.terminate()
        server.wait_for_exit()
        lines = server.output().splitlines()
    assert [line for line in lines if line.startswith("imported ")] == []
