"""Every answer has its request id, every call its count and its line, whatever happens to it."""

import asyncio
import contextlib
import logging
from types import SimpleNamespace

import pytest

from quire.observability.log import current_call
from quire.server.telemetry.monitor import Monitor, RequestIdMiddleware

ROUTE = SimpleNamespace(path_format="/v1/completions")


def answering(status=200, *, route=ROUTE, state=None, raises=None):
    """An application that answers so, and one that raises afterwards or instead."""

    async def app(scope, receive, send):
        if route is not None:
            scope["route"] = route
        scope["state"] |= state or {}
        if status is not None:
            await send({"type": "http.response.start", "status": status, "headers": [(b"a", b"b")]})
            await send({"type": "http.response.body", "body": b"x"})
        if raises is not None:
            raise raises

    return app


def call(app, headers=(), monitor=None, **scope):
    """(messages sent, scope, monitor) of one call."""
    sent, monitor = [], monitor or Monitor()
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/completions",
        "headers": list(headers),
    } | scope

    async def send(message):
        sent.append(message)

    asyncio.run(RequestIdMiddleware(app, monitor, {"/metrics"})(scope, None, send))
    return sent, scope, monitor


def id_of(sent):
    headers = dict(sent[0]["headers"])
    assert headers[b"a"] == b"b" and headers[b"request-id"] == headers[b"x-request-id"]
    return headers[b"x-request-id"].decode()


@pytest.mark.parametrize("given", ["a", "8f14e45f-ceea/1:2", "x" * 128, '"quoted"'])
def test_a_client_s_id_is_kept(given):
    sent, scope, _ = call(answering(), [(b"x-request-id", given.encode())])
    assert id_of(sent) == given == scope["state"]["request_id"]


@pytest.mark.parametrize("given", [b"", b"two words", b"x" * 129, b"a\xff", b"a\x7f", b"a\tb"])
def test_an_id_that_is_not_sane_is_replaced(given):
    sent, _, _ = call(answering(), [(b"x-request-id", given)])
    assert id_of(sent).startswith("req-") and len(id_of(sent)) == 36


def test_without_one_each_call_gets_its_own():
    assert id_of(call(answering())[0]) != id_of(call(answering())[0])


def test_served_app_sees_the_current_call():
    seen = []

    async def app(scope, receive, send):
        seen.append(current_call())

    header = (b"traceparent", b"00-1-2-01")
    _, scope, _ = call(app, [(b"x-request-id", b"mine"), header, (b"tracestate", b"v=1")])
    (found,) = seen
    assert (found.request_id, found.traceparent, found.tracestate) == ("mine", "00-1-2-01", "v=1")
    assert found.began_s == scope["state"]["arrival_s"] > 0 and found.began_at_ns > 0
    assert current_call() is None


def test_calls_are_counted_by_method_route_and_status():
    monitor = Monitor()
    call(answering(), monitor=monitor)
    call(answering(404, route=None), monitor=monitor, method="BREW", path="/x/1")
    call(answering(429, state={"error_code": "tenant_busy"}), monitor=monitor)
    assert monitor.http_calls == {
        ("POST", "/v1/completions", 200): 1,
        ("other", "other", 404): 1,
        ("POST", "/v1/completions", 429): 1,
    }
    assert monitor.http_errors == {(404, "other"): 1, (429, "tenant_busy"): 1}
    assert monitor.num_open_http_calls == 0


@pytest.mark.parametrize(
    ("app", "status", "code", "raised"),
    [
        (answering(None, raises=ValueError("bug")), 500, "other", ValueError),
        (answering(None, raises=asyncio.CancelledError()), 499, "client_gone", BaseException),
        (answering(None), 499, "client_gone", None),
        (answering(200, raises=ValueError("bug")), 200, None, ValueError),
    ],
)
def test_a_call_that_fails_is_counted_and_no_longer_open(app, status, code, raised):
    monitor = Monitor()
    with pytest.raises(raised) if raised else contextlib.nullcontext():
        call(app, monitor=monitor)
    assert monitor.http_calls == {("POST", "/v1/completions", status): 1}
    assert monitor.http_errors == ({} if code is None else {(status, code): 1})
    assert monitor.num_open_http_calls == 0


def test_other_kinds_of_connection_pass_through():
    seen = []

    async def app(scope, receive, send):
        seen.append(scope)

    asyncio.run(RequestIdMiddleware(app, Monitor())({"type": "lifespan"}, None, None))
    assert seen == [{"type": "lifespan"}]


def test_the_access_line_says_what_was_answered_and_what_it_cost(caplog):
    async def app(scope, receive, send):
        found = current_call()
        found.generation_id, found.num_prompt_tokens, found.num_output_tokens = "cmpl-1-0", 12, 30
        await answering(state={"tenant": SimpleNamespace(name="alice")})(scope, receive, send)

    with caplog.at_level(logging.INFO, "quire.access"):
        call(app)
    (line,) = caplog.records
    assert line.message.startswith("POST /v1/completions 200 ")
    assert "generation_id=cmpl-1-0 num_prompt_tokens=12 num_output_tokens=30" in line.message
    assert line.message.endswith("tenant=alice")
    assert line.__dict__["fields"]["status"] == 200 and line.__dict__["fields"]["ms"] >= 0


@pytest.mark.parametrize("path", ["/a\nINFO forged", "/\x1b[31m", "/" + "a" * 5000])
def test_a_path_can_forge_no_line(caplog, path):
    with caplog.at_level(logging.INFO, "quire.access"):
        call(answering(404, route=None), path=path)
    (line,) = caplog.records
    assert line.message.isprintable() and len(line.message) < 300


def test_probes_are_told_at_debug_only(caplog):
    probe = answering(route=SimpleNamespace(path_format="/metrics"))
    with caplog.at_level(logging.INFO, "quire.access"):
        call(probe, method="GET", path="/metrics")
    assert caplog.records == []
    with caplog.at_level(logging.DEBUG, "quire.access"):
        call(probe, method="GET", path="/metrics")
    assert len(caplog.records) == 1


def test_every_answer_of_a_real_server_has_the_id(http):
    header = {"X-Request-ID": "mine-1"}
    for method, path, body, status in (
        ("POST", "/v1/completions", {"prompt": "a", "max_tokens": 2}, 200),
        ("POST", "/v1/completions", {"prompt": "a", "max_tokens": 2, "stream": True}, 200),
        ("POST", "/v1/completions", {"prompt": "a", "top_p": 7}, 400),
        ("GET", "/nowhere", None, 404),
        ("GET", "/v1/completions", None, 405),
        ("GET", "/health", None, 200),
    ):
        answer = http.request(method, path, json=body, headers=header)
        assert (answer.status_code, answer.headers["x-request-id"]) == (status, "mine-1")
    assert http.get("/health").headers["x-request-id"].startswith("req-")
