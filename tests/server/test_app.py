"""The application's frame: what is served where, and what a call goes through on its way there."""

import asyncio
import errno
import json
import logging

import pytest
from starlette.responses import StreamingResponse
from tests.server.asgi import JSON, call, parts_of

from quire.errors import QuireError
from quire.server.app import SECURITY_HEADERS, create_app
from quire.server.http.guard import AccessConfig
from quire.server.routes.openapi import api_document
from quire.server.served_models import ServedModels
from quire.server.service import Service
from quire.server.tenants.keys import ApiKeys

ORIGIN = "https://page.example"
KEY = (b"authorization", b"Bearer alice-key-1")


def make(**access):
    """An application without an engine: what needs one fails as a bug would."""
    return create_app(ServedModels.of(Service(None, None, None, "mine")), AccessConfig(**access))


def browser(method=None):
    """The headers of a call from a web page, or of the preflight of one by `method`."""
    headers = [(b"origin", ORIGIN.encode())]
    if method is not None:
        wanted = b"authorization,content-type,x-stainless-os"
        headers += [
            (b"access-control-request-method", method),
            (b"access-control-request-headers", wanted),
        ]
    return headers


def test_the_paths_are_openais_and_a_few_of_ours():
    assert set(api_document(make().routes)["paths"]) == {
        "/v1/completions",
        "/v1/chat/completions",
        "/api/chat",
        "/api/generate",
        "/api/embed",
        "/api/embeddings",
        "/api/show",
        "/api/ps",
        "/api/delete",
        "/api/pull",
        "/api/tags",
        "/api/version",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/responses",
        "/v1/responses/input_tokens",
        "/v1/responses/{response_id}",
        "/v1/responses/{response_id}/input_items",
        "/v1/files",
        "/v1/files/{file_id}",
        "/v1/files/{file_id}/content",
        "/v1/batches",
        "/v1/batches/{batch_id}",
        "/v1/batches/{batch_id}/cancel",
        "/sleep",
        "/wake_up",
        "/is_sleeping",
        "/v1/models",
        "/v1/models/{name}",
        "/v1/embeddings",
        "/score",
        "/v1/score",
        "/rerank",
        "/v1/rerank",
        "/v2/rerank",
        "/v1/load_lora_adapter",
        "/v1/unload_lora_adapter",
        "/tokenize",
        "/detokenize",
        "/tokenizer_info",
        "/version",
        "/health",
        "/live",
        "/ready",
        "/metrics",
        "/memory",
        "/memory/blocks",
        "/stats",
        "/stats/table",
        "/replicas",
        "/replicas/restart",
        "/replicas/scale",
    }


@pytest.mark.parametrize("pieces", [1, 7])
def test_a_body_beyond_the_bound_is_refused_as_it_comes(pieces):
    body = json.dumps({"prompt": "x" * 2000}).encode()
    app = make(max_body_bytes=1000)
    answer = call(app, "/v1/completions", messages=parts_of(body, pieces))
    assert answer.status == 413
    assert "longer than 1000 bytes" in answer.error["message"]
    assert answer.error["code"] == answer.state["error_code"] == "body_too_long"


def test_a_body_that_does_not_come_is_given_up():
    messages = [{"type": "http.request", "body": b'{"prompt"', "more_body": True}]
    answer = call(make(body_timeout_s=0.05), "/v1/completions", messages=messages)
    assert (answer.status, answer.error["code"]) == (408, "request_timeout")
    assert answer.headers["connection"] == "close"


def test_a_client_that_leaves_while_it_sends_is_no_error(caplog):
    messages = [
        {"type": "http.request", "body": b'{"prompt"', "more_body": True},
        {"type": "http.disconnect"},
    ]
    with caplog.at_level(logging.WARNING):
        answer = call(make(), "/v1/completions", messages=messages)
    assert (answer.status, answer.content, caplog.records) == (499, b"", [])


def test_a_bug_is_logged_and_told_without_its_insides(caplog):
    with caplog.at_level(logging.ERROR, "quire"):
        answer = call(make(), "/v1/models", method="GET")
    assert answer.status == 500
    assert (answer.error["type"], answer.error["code"]) == ("server_error", QuireError.code)
    assert "AttributeError" in answer.error["message"]
    assert "NoneType" not in answer.error["message"]
    assert answer.headers["x-request-id"]  # as on every answer
    (record,) = caplog.records
    assert record.exc_info is not None and "/v1/models" in record.getMessage()


@pytest.mark.parametrize(
    ("failure", "status", "code"),
    [
        (OSError(errno.EMFILE, "Too many open files"), 503, "exhausted"),
        (MemoryError(), 503, "exhausted"),
        (LookupError("unknown encoding"), 500, QuireError.code),
        (OSError(errno.EIO, "I/O error"), 500, QuireError.code),
        (ValueError("too many digits"), 400, "invalid_request"),
        (RecursionError(), 400, "invalid_request"),
    ],
)
def test_only_what_a_body_can_cause_is_its_client_s_mistake(monkeypatch, failure, status, code):
    """While a body is read anything may fail: only some of it is a 400."""

    def fail(body, max_values):
        raise failure
        yield

    monkeypatch.setattr("quire.server.routes.endpoint.parse", fail)
    answer = call(make(), "/v1/completions", b'{"prompt": "a"}')
    assert (answer.status, answer.error["code"]) == (status, code)
    assert ("retry-after" in answer.headers) == (status == 503)


def test_a_bug_in_the_middle_of_an_answer_cuts_it():
    app = make()

    async def half(http):
        async def pieces():
            yield b"one"
            raise KeyError("two")

        return StreamingResponse(pieces())

    app.add_route("/half", half)
    answer = call(app, "/half", method="GET", raised=KeyError)
    assert (answer.status, answer.content) == (200, b"one")


def test_the_guard_stands_before_everything_but_the_request_id():
    app = make(keys=ApiKeys(["alice:alice-key-1"]), max_body_bytes=10)
    too_long = [JSON, (b"content-length", b"99")]
    answer = call(app, "/v1/completions", b"x" * 99, headers=too_long)
    assert (answer.status, answer.num_received) == (401, 0)
    assert answer.headers["x-request-id"]
    assert call(app, "/v1/completions", b"x" * 99, headers=[*too_long, KEY]).status == 413


@pytest.mark.parametrize("path", ["//v1//models", "//metrics", "//v1/load_lora_adapter", "//docs"])
def test_repeated_slashes_lead_around_no_key(path):
    guarded = make(keys=ApiKeys(["alice:alice-key-1"]))
    assert call(guarded, path, method="GET").status == 401
    key = [KEY] if "v1" in path else []
    status = call(make(), path, method="POST", headers=[JSON, *key], body=b"{}").status
    assert status == (404 if path in ("//metrics", "//v1/load_lora_adapter") else 405)


def test_cors_is_off_by_default():
    app = make()
    preflight = call(app, "/v1/completions", method="OPTIONS", headers=browser(b"POST"))
    assert preflight.status == 405
    plain = call(app, "/nothing", method="GET", headers=browser())
    assert plain.status == 404
    for answer in (preflight, plain):
        assert not [name for name in answer.headers if name.startswith("access-control")]


@pytest.mark.parametrize("allowed", [ORIGIN, "*"])
def test_allowed_pages_may_call_with_a_key(allowed):
    app = make(keys=ApiKeys(["alice:alice-key-1"]), allowed_origins=(allowed,))
    preflight = call(app, "/v1/completions", method="OPTIONS", headers=browser(b"POST"))
    assert preflight.status == 200  # without a key: browsers send none
    assert preflight.headers["access-control-allow-origin"] == allowed
    assert "DELETE" in preflight.headers["access-control-allow-methods"]  # of stored responses
    assert "x-stainless-os" in preflight.headers["access-control-allow-headers"]
    refused = call(app, "/v1/completions", headers=[JSON, *browser()])
    assert (refused.status, refused.error["code"]) == (401, "invalid_api_key")
    passed = call(app, "/nothing", method="GET", headers=[*browser(), KEY])
    assert passed.status == 404
    for answer in (refused, passed):
        assert answer.headers["access-control-allow-origin"] == allowed
        assert "X-Request-ID" in answer.headers["access-control-expose-headers"]
        assert "access-control-allow-credentials" not in answer.headers


def test_other_pages_may_not():
    app = make(allowed_origins=("https://other.example",))
    preflight = call(app, "/v1/completions", method="OPTIONS", headers=browser(b"POST"))
    assert preflight.status == 400
    plain = call(app, "/nothing", method="GET", headers=browser())
    for answer in (preflight, plain):
        assert "access-control-allow-origin" not in answer.headers


def test_a_page_can_not_send_json_as_plain_text():
    """That it may send to any server, unasked."""
    text = [(b"content-type", b"text/plain")]
    answer = call(make(), "/v1/completions", b'{"prompt": "a"}', headers=text)
    assert answer.status == 400
    assert "Content-Type is 'text/plain'" in answer.error["message"]


def test_other_kinds_of_connection_pass():
    sent = []

    async def run():
        messages = [{"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}]

        async def receive():
            return messages.pop(0)

        async def send(message):
            sent.append(message["type"])

        await make()({"type": "lifespan"}, receive, send)

    asyncio.run(run())
    assert sent == ["lifespan.startup.complete", "lifespan.shutdown.complete"]


def test_every_answer_of_a_server_says_that_its_type_is_meant(server):
    for path in ("/health", "/nothing", "/v1/models"):
        headers = server.http.get(path).headers
        assert {(name, headers.get(name)) for name, _ in SECURITY_HEADERS} == set(SECURITY_HEADERS)
        assert "server" not in headers
