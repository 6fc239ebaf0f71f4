"""The guard: heads that have two meanings, or ask for what is not done, are refused."""

import json

import pytest
from tests.server.asgi import HOST, call

from quire.server.http.guard import (
    MAX_HEAD_BYTES,
    RequestHead,
)


async def echo(scope, receive, send):
    seen = json.dumps([scope["path"], scope["raw_path"].decode()]).encode()
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": seen, "more_body": False})


def ask(*headers, path="/a", method="POST", version=None, raw_path=None, host=True):
    """The answer to a call with these headers, beside that of the host."""

    async def app(scope, receive, send):
        fields = {} if version is None else {"http_version": version}
        fields |= {} if raw_path is None else {"raw_path": raw_path}
        kept = [pair for pair in scope["headers"] if host or pair != HOST]
        await RequestHead(echo)(scope | fields | {"headers": kept}, receive, send)

    return call(app, path, headers=headers, method=method)


CHUNKED = (b"transfer-encoding", b"chunked")


@pytest.mark.parametrize(
    ("headers", "options", "status", "words"),
    [
        (((b"content-length", b"3"), CHUNKED), {}, 400, "both Content-Length and Transfer-Enc"),
        ((CHUNKED, (b"content-length", b"3")), {}, 400, "both Content-Length and Transfer-Enc"),
        ((CHUNKED,), {"version": "1.0"}, 400, "HTTP/1.0, which has no Transfer-Encoding"),
        ((CHUNKED, CHUNKED), {}, 501, "the Transfer-Encoding is 'chunked, chunked'"),
        (((b"transfer-encoding", b"gzip, chunked"),), {}, 501, "'gzip, chunked', but only chunked"),
        (((b"transfer-encoding", b"identity"),), {}, 501, "'identity', but only chunked"),
        (((b"content-encoding", b"gzip"),), {}, 415, "the Content-Encoding is 'gzip', but bodies"),
        (((b"content-encoding", b"br, gzip"),), {}, 415, "is 'br, gzip'"),
        (((b"content-encoding", b"x" * 500),), {}, 415, "is 'xxx"),
        ((HOST,), {}, 400, "the request has 2 Host headers, but must have one"),
        ((), {"host": False}, 400, "the request has 0 Host headers"),
        ((), {"version": "2.0"}, 505, "the request is of HTTP/2.0, but this server speaks"),
        ((), {"version": "0.9"}, 505, "HTTP/0.9"),
        ((), {"path": "a"}, 400, "the request's target is 'a', but must be a path"),
        ((), {"path": "*"}, 400, "target is '*'"),
        ((), {"path": "ftp://x/a"}, 400, "target is 'ftp://x/a'"),
        ((), {"path": "x:443", "method": "CONNECT"}, 400, "target is 'x:443'"),
        ((), {"path": "http://x/a", "method": "CONNECT"}, 400, "target is 'http://x/a'"),
        (((b"x", b"a" * MAX_HEAD_BYTES),), {}, 431, f"more than {MAX_HEAD_BYTES} bytes"),
        (((b"x", b""),) * (MAX_HEAD_BYTES // 5), {}, 431, "send fewer"),
        ((), {"path": "/" + "a" * MAX_HEAD_BYTES}, 431, "target and headers"),
    ],
)
def test_a_head_that_is_not_understood_is_refused_and_the_connection_closed(
    headers, options, status, words
):
    answer = ask(*headers, **options)
    assert answer.status == status
    assert words in answer.error["message"] and len(answer.error["message"]) < 300
    assert answer.headers["connection"] == "close"
    assert answer.headers["x-should-retry"] == "false"
    assert answer.state["error_code"] == answer.error["code"]


@pytest.mark.parametrize(
    ("headers", "options"),
    [
        ((), {}),
        ((CHUNKED,), {}),
        (((b"transfer-encoding", b" Chunked "),), {}),
        (((b"content-length", b"0"),), {}),
        (((b"content-encoding", b"identity"),), {}),
        (((b"content-encoding", b""),), {}),
        ((), {"version": "1.0", "host": False}),
        ((), {"path": "*", "method": "OPTIONS"}),
        (((b"cookie", b"a" * (MAX_HEAD_BYTES - 100)),), {}),
    ],
)
def test_other_heads_are_let_through(headers, options):
    assert ask(*headers, **options).status == 200


@pytest.mark.parametrize(
    ("target", "path"),
    [
        ("http://x/a", "/a"),
        ("https://x:8000/a/b", "/a/b"),
        ("HTTP://x", "/"),
        ("http://x/%61%20", "/a "),
        ("http://%61b/c", "/c"),
        ("http://user:word@x//a", "/a"),
    ],
)
def test_a_target_for_proxies_has_a_path(target, path):
    answer = ask(path=target.replace("%61", "a").replace("%20", " "), raw_path=target.encode())
    raw = target.partition("://")[2].partition("/")
    assert answer.json() == [path, raw[1] + raw[2] or "/"]


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("//v1/completions", "/v1/completions"),
        ("/v1//chat///completions", "/v1/chat/completions"),
        ("//", "/"),
        ("/health//", "/health/"),
        ("//v1//models", "/v1/models"),
        ("/v1/models/a", "/v1/models/a"),
        ("//v1//models/a//b", "/v1/models/a//b"),
        ("/v1/models//data/model", "/v1/models//data/model"),
        ("//v1///models//data//model", "/v1/models//data//model"),
        # a proxy may keep clients from these letter by letter
        ("//metrics", "//metrics"),
        ("/memory//blocks", "/memory//blocks"),
        ("/memoryx//blocks", "/memoryx/blocks"),
    ],
)
def test_repeated_slashes_are_one_but_in_a_name_and_before_an_operator_s_path(path, expected):
    head = RequestHead(echo, ["/v1/models/"], ["/metrics", "/memory"])
    assert call(head, path).json()[0] == expected
