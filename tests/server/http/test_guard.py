"""The guard: keys, the operator, and bodies that are long or slow."""

import asyncio
import socket
import time

import httpx
import openai
import pytest
from tests.server.asgi import JSON, call, parts_of

from quire.errors import BodyTooLongError, ConfigurationError, QuireError, RequestTimeoutError
from quire.server.http import guard
from quire.server.http.body_budget import SLOW_S, BodyBudget
from quire.server.http.guard import (
    AccessConfig,
    AccessGuard,
    BodyLimit,
    presented_keys,
)
from quire.server.tenants.keys import ApiKeys
from quire.server.tenants.tenants import NO_TENANT, Tenant

KEYS = ApiKeys(["alice:alice-key-1", "bob:bob-key-1"])


WITH_OPERATOR = ApiKeys(["alice:alice-key-1", "operator:operator-key-1"])


def guarded_by(inner, keys):
    """As the application's own routes declare it."""
    return AccessGuard(inner, keys, {"/health"}, ("/memory", "/metrics"))


def bearer(key):
    return (b"authorization", f"Bearer {key}".encode())


class Inner:
    """What the guard stands before: notes the state of the calls that it gets."""

    def __init__(self):
        self.states = []

    async def __call__(self, scope, receive, send):
        self.states.append(dict(scope["state"]))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [bearer("")],
        [bearer("wrong-key-1")],
        [(b"authorization", b"alice-key-1")],
        [(b"authorization", b"Basic alice-key-1")],
        [bearer("wrong-key-1"), bearer("alice-key-1")],  # only the first counts
        [(b"x-api-key", b"")],
        [(b"x-api-key", b"wrong-key-1")],
        [(b"cookie", b"alice-key-1")],
        [bearer("\xff" * 60_000)],
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/docs", "/health/", "//health", "/nothing"])
def test_without_a_valid_key_the_answer_is_401_before_the_body_is_read(path, headers):
    inner = Inner()
    answer = call(guarded_by(inner, KEYS), path, headers=[JSON, *headers])
    assert (answer.status, answer.num_received, inner.states) == (401, 0, [])
    assert answer.headers["www-authenticate"] == "Bearer"
    error = answer.error
    assert error.keys() == {"message", "type", "param", "code"}
    assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
    assert "Authorization: Bearer" in error["message"] and "wrong-key" not in error["message"]
    assert answer.state["error_code"] == "invalid_api_key"


@pytest.mark.parametrize(
    ("headers", "name"),
    [
        ([bearer("alice-key-1")], "alice"),
        ([(b"authorization", b"bearer   bob-key-1 ")], "bob"),
        ([(b"x-api-key", b"bob-key-1")], "bob"),
        ([bearer("none"), (b"x-api-key", b"alice-key-1")], "alice"),
        ([(b"authorization", b"Basic eA=="), (b"x-api-key", b"bob-key-1")], "bob"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/health"])
def test_a_valid_key_names_the_tenant(path, headers, name):
    inner = Inner()
    assert call(guarded_by(inner, KEYS), path, headers=headers).status == 200
    assert inner.states == [{"tenant": Tenant(name), "is_operator": False}]


@pytest.mark.parametrize("headers", [[], [bearer("wrong-key-1")]])
def test_health_is_open_and_then_of_no_tenant(headers):
    inner = Inner()
    assert call(guarded_by(inner, KEYS), "/health", method="GET", headers=headers).status == 200
    assert inner.states == [{"is_operator": False}]


@pytest.mark.parametrize(
    ("headers", "is_operator"),
    [
        ([], True),
        ([(b"authorization", b" "), (b"x-api-key", b"")], True),
        ([bearer("anything")], False),
        ([(b"authorization", b"Basic eA==")], False),
        ([(b"x-api-key", b"anything")], False),
    ],
)
def test_without_keys_all_are_one_tenant_and_who_brings_none_the_operator(headers, is_operator):
    inner = Inner()
    assert call(guarded_by(inner, None), "/v1/models", headers=headers).status == 200
    assert inner.states == [{"tenant": NO_TENANT, "is_operator": is_operator}]
    status = call(guarded_by(inner, None), "/metrics", headers=headers).status
    assert status == (200 if is_operator else 403)


def test_only_one_key_of_each_kind_is_looked_up():
    headers = [bearer(f"key-{n}") for n in range(1000)] + [(b"x-api-key", b"x")] * 1000
    assert list(presented_keys(headers)) == [b"key-0", b"x"]


def test_a_websocket_is_refused_like_any_call():
    sent = []

    async def connect(headers):
        async def send(message):
            sent.append(message)

        scope = {"type": "websocket", "path": "/v1/realtime", "headers": headers}
        await guarded_by(Inner(), KEYS)(scope, None, send)

    asyncio.run(connect([]))
    assert sent == [{"type": "websocket.close", "code": 1008}]


@pytest.mark.parametrize(
    "origin",
    ["https://a.example/", "a.example", "https://A.example", "ftp://a", "", "https://a:x", "null"],
)
def test_an_origin_that_no_browser_sends_is_refused(origin):
    with pytest.raises(ConfigurationError, match=r"allowed_origins has .* an origin is"):
        AccessConfig(allowed_origins=("https://fine.example", origin))


def test_access_options_are_checked():
    origins = ("*", "http://localhost:3000", "https://a-b.example", "http://[::1]:80")
    assert not AccessConfig(allowed_origins=origins).is_guarded
    assert AccessConfig(keys=KEYS).is_guarded
    with pytest.raises(ConfigurationError, match="max_body_bytes is 0"):
        AccessConfig(max_body_bytes=0)


# With a real server.

OTHER_ROUTES = [
    ("GET", "/docs"),
    ("GET", "/openapi.json"),
    ("GET", "/metrics"),
    ("GET", "/nothing"),
    ("POST", "/v1/responses"),
    ("OPTIONS", "/v1/completions"),
]
COMPLETION = {"prompt": "def f(", "max_tokens": 2}


def routes(guarded):
    paths = guarded.http.get("/openapi.json").raise_for_status().json()["paths"]
    served = [(method.upper(), path) for path, methods in paths.items() for method in methods]
    assert ("POST", "/v1/completions") in served and ("GET", "/memory") in served
    return served + OTHER_ROUTES


OPEN_PATHS = ("/health", "/live", "/ready")


def test_every_route_but_probes_needs_a_key(guarded):
    with httpx.Client(base_url=guarded.url, timeout=60) as stranger:
        for method, path in routes(guarded):
            answer = stranger.request(method, path, headers={"X-Api-Key": "no-such-key"})
            if path not in OPEN_PATHS:
                assert answer.status_code == 401, (method, path)
                error = answer.json()["error"]  # Ollama's is a text
                assert "key" in error if isinstance(error, str) else error["message"]
            else:
                assert answer.status_code == 200 and "engine" not in answer.json()
        assert stranger.get("/health").status_code == 200
    assert guarded.http.get("/health").json() == {"status": "ok"}
    assert "engine" in guarded.http.get("/health", headers=guarded.operator).json()


def test_a_stranger_uploads_nothing(guarded):
    """The head is enough for an answer, which comes before a byte of the body is sent."""
    host, port = guarded.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
            b"Content-Type: application/json\r\nContent-Length: 1000000\r\n\r\n"
        )
        assert connection.recv(4096).startswith(b"HTTP/1.1 401")


def test_both_headers_open_for_openais_and_others_clients(guarded):
    for headers in ({"Authorization": "Bearer bob-key-1"}, {"X-Api-Key": "alice-key-2"}):
        answer = httpx.post(
            f"{guarded.url}/v1/completions", json=COMPLETION, headers=headers, timeout=60
        )
        assert answer.status_code == 200


def test_openais_client_knows_the_refusal(guarded):
    with (
        openai.OpenAI(base_url=f"{guarded.url}/v1", api_key="wrong-key-1") as client,
        pytest.raises(openai.AuthenticationError) as caught,
    ):
        client.models.list()
    assert caught.value.code == "invalid_api_key"


def status_with(guarded, key):
    headers = {"Authorization": f"Bearer {key}"}
    return httpx.get(f"{guarded.url}/v1/models", headers=headers, timeout=60).status_code


def test_the_file_of_keys_is_read_again_while_the_server_runs(guarded):
    def wait_until(key, status):
        deadline_s = time.monotonic() + 20
        while status_with(guarded, key) != status:
            assert time.monotonic() < deadline_s, (key, status)
            time.sleep(0.1)

    before = guarded.key_file.read_text()
    assert status_with(guarded, "carol-key-1") == 200
    try:
        guarded.key_file.write_text("carol:carol-key-2\n")
        wait_until("carol-key-2", 200)
        assert status_with(guarded, "carol-key-1") == 401
        assert status_with(guarded, "alice-key-1") == 200  # from the command line
        guarded.key_file.write_text("carol:carol-key-3\nbroken\n")
        assert status_with(guarded, "carol-key-2") == 200
    finally:
        guarded.key_file.write_text(before)
    wait_until("carol-key-1", 200)
    assert status_with(guarded, "carol-key-3") == 401


def test_tenants_are_named_and_keys_are_not(guarded):
    body = COMPLETION | {"max_tokens": 800, "ignore_eos": True, "stream": True}
    with guarded.http.stream("POST", "/v1/completions", json=body) as stream:
        lines = stream.iter_lines()  # held: to drop it would end the request
        next(lines)
        report = guarded.http.get("/memory", headers=guarded.operator).text
        scraped = guarded.http.get("/metrics", headers=guarded.operator).text
    assert '"alice"' in report and 'tenant="alice"' in scraped
    assert "alice-key" not in report + scraped


@pytest.mark.parametrize("path", ["/memory", "/memory/blocks", "/metrics", "/metrics/"])
@pytest.mark.parametrize(
    ("keys", "key", "advice"),
    [
        (WITH_OPERATOR, "alice-key-1", "ask with a key that is named operator"),
        (KEYS, "alice-key-1", "(operator:KEY among the server's keys)"),
        (None, "anything", "has no keys, so a call that brings one counts as a tenant's"),
    ],
)
def test_the_whole_servers_numbers_are_the_operators(path, keys, key, advice):
    inner = Inner()
    answer = call(guarded_by(inner, keys), path, headers=[bearer(key)])
    assert (answer.status, answer.num_received, inner.states) == (403, 0, [])
    assert (answer.error["type"], answer.error["code"]) == ("permission_error", "operator_only")
    assert path in answer.error["message"] and advice in answer.error["message"]


def test_the_operator_has_a_key_of_that_name_or_needs_none():
    inner = Inner()
    headers = [bearer("operator-key-1")]
    assert call(guarded_by(inner, WITH_OPERATOR), "/metrics", headers=headers).status == 200
    assert call(guarded_by(inner, None), "/metrics").status == 200
    assert inner.states == [
        {"tenant": Tenant("operator"), "is_operator": True},
        {"tenant": NO_TENANT, "is_operator": True},
    ]
    assert AccessConfig(keys=WITH_OPERATOR).has_operator and AccessConfig().has_operator
    assert not AccessConfig(keys=KEYS).has_operator


def test_all_else_is_everybodys():
    inner = Inner()
    for path in ("/v1/completions", "/health", "/memoryx", "/metricsx"):
        answer = call(guarded_by(inner, WITH_OPERATOR), path, headers=[bearer("alice-key-1")])
        assert answer.status == 200, path


class Reader:
    """Reads the whole body, as the routes do; `error` is what that raised."""

    def __init__(self):
        self.body = b""
        self.error = None

    async def __call__(self, scope, receive, send):
        try:
            while True:
                message = await receive()
                self.body += message.get("body", b"")
                if not message.get("more_body"):
                    break
        except QuireError as error:
            self.error = error
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})


def length(num_bytes):
    return (b"content-length", str(num_bytes).encode())


def test_a_body_announced_too_long_is_refused_before_it_is_read():
    reader = Reader()
    answer = call(BodyLimit(reader, 1000), "/", headers=[JSON, length(1001)])
    assert (answer.status, answer.num_received) == (413, 0)
    assert (answer.error["code"], answer.error["type"]) == (
        "body_too_long",
        "invalid_request_error",
    )
    assert "longer than 1000 bytes" in answer.error["message"]
    assert reader.body == b"" and reader.error is None


def test_the_zeros_before_a_length_change_nothing():
    """Python reads no number of more than 4,300 digits, and the parsers of HTTP take it."""
    zeros = b"0" * 5000
    for value, status in ((zeros + b"4", 200), (zeros, 200), (zeros + b"9" * 5000, 413)):
        app = BodyLimit(Reader(), 1000)
        headers = [JSON, (b"content-length", value)]
        assert call(app, "/", headers=headers, messages=parts_of(b"1234", 1)).status == status


@pytest.mark.parametrize("pieces", [1, 7])
@pytest.mark.parametrize("headers", [[JSON], [JSON, (b"content-length", b"nonsense")]])
def test_a_body_in_chunks_is_refused_as_soon_as_it_is_too_long(pieces, headers):
    reader = Reader()
    messages = parts_of(b"x" * 2000, pieces)
    answer = call(BodyLimit(reader, 1000), "/", headers=headers, messages=messages)
    assert reader.error.http_status == 413
    assert isinstance(reader.error, BodyTooLongError)
    assert answer.num_received == (1 if pieces == 1 else 4)


@pytest.mark.parametrize("pieces", [1, 7])
def test_a_body_within_the_bounds_passes(pieces):
    reader, body = Reader(), bytes(range(250)) * 4
    call(BodyLimit(reader, 1000), "/", headers=[length(1000)], messages=parts_of(body, pieces))
    assert (reader.body, reader.error) == (body, None)


def test_a_body_that_does_not_come_is_given_up():
    reader = Reader()
    messages = [{"type": "http.request", "body": b"x" * 10, "more_body": True}]
    call(BodyLimit(reader, 1000, timeout_s=0.05), "/", messages=messages)
    assert reader.error.http_status == 408
    assert isinstance(reader.error, RequestTimeoutError)
    assert "only 10 bytes of the body have come" in str(reader.error)


def test_a_long_body_has_as_long_as_its_length_needs(monkeypatch):
    """timeout_s plus a second for each so many bytes: a first piece buys time for the next."""
    monkeypatch.setattr(guard, "MIN_BYTES_PER_S", 10)

    async def read(first):
        pieces = [{"type": "http.request", "body": first, "more_body": True}]

        async def receive():
            if pieces:
                return pieces.pop(0)
            await asyncio.sleep(0.2)
            return {"type": "http.request", "body": b"y", "more_body": False}

        async def send(message):
            pass

        reader = Reader()
        await BodyLimit(reader, 1000, timeout_s=0.05)(
            {"type": "http", "headers": []}, receive, send
        )
        return reader

    assert asyncio.run(read(b"x")).error is not None  # 0.05 s + 0.1 s
    assert asyncio.run(read(b"x" * 100)).error is None


def test_a_fast_beginning_buys_no_time_for_a_body_that_stops():
    """At 16 KiB per second, a MiB would buy a minute."""
    reader = Reader()
    whole = (1 << 20) + 1
    messages = parts_of(b"x" * whole, 17)[:-1]
    call(BodyLimit(reader, 2 * whole, timeout_s=0.05), "/", messages=messages)
    assert isinstance(reader.error, RequestTimeoutError)


def test_a_body_that_stops_is_ended_when_another_needs_its_room():
    passed_s = [0.0]
    budget = BodyBudget(max_bytes=1 << 20, clock=lambda: time.monotonic() + passed_s[0])

    async def play():
        reader, came = Reader(), asyncio.Event()
        pieces = parts_of(b"x" * (1 << 20), 2)[:1]

        async def receive():
            if pieces:
                return pieces.pop()
            came.set()
            await asyncio.Event().wait()

        async def send(message):
            pass

        app = BodyLimit(reader, 1 << 20, budget=budget)
        scope = {"type": "http", "headers": []}
        task = asyncio.create_task(app(scope, receive, send))
        await came.wait()
        passed_s[0] += SLOW_S
        budget.open("").expect(1 << 20)
        await asyncio.wait_for(task, 10)
        return reader.error

    assert isinstance(asyncio.run(play()), RequestTimeoutError)
    assert budget.num_bytes == 0


def test_once_the_body_is_whole_nothing_is_timed():
    """A handler then waits for the client to leave, for as long as its answer takes."""
    seen = []

    async def inner(scope, receive, send):
        seen.append(await receive())
        seen.append(await receive())

    async def run():
        messages = [*parts_of(b"{}", 1), {"type": "http.disconnect"}]

        async def receive():
            if len(messages) == 1:
                await asyncio.sleep(0.15)
            return messages.pop(0)

        await BodyLimit(inner, 1000, timeout_s=0.05)({"type": "http", "headers": []}, receive, None)

    asyncio.run(run())
    assert [message["type"] for message in seen] == ["http.request", "http.disconnect"]


def test_other_kinds_of_connection_pass():
    seen = []

    async def inner(scope, receive, send):
        seen.append(await receive())

    async def receive():
        return {"type": "lifespan.startup"}

    asyncio.run(BodyLimit(inner)({"type": "lifespan"}, receive, None))
    assert seen == [{"type": "lifespan.startup"}]
