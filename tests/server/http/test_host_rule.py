"""The Host headers that a server answers to."""

import pytest
from tests.server.asgi import call

from quire.errors import ConfigurationError
from quire.server.http.guard import RequestHead
from quire.server.http.host_rule import HostRule, host_rule


def rule(*allowed, listens_on="127.0.0.1", has_keys=False):
    return host_rule(allowed, listens_on, has_keys=has_keys)


@pytest.mark.parametrize(
    "host",
    [
        *("localhost", "localhost:8000", "LOCALHOST.", "a.localhost:1", "127.0.0.1:8000", ""),
        *("[::1]:8000", "[::1]", "::1", "192.168.1.7:8000", "10.0.0.2", "box.example:80"),
    ],
)
def test_own_names_and_addresses_are_answered(host):
    assert rule("Box.Example").allows(host)


@pytest.mark.parametrize(
    "host",
    [
        *("evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example"),
        *("box.example.evil", "xlocalhost", "[evil]:8000", "127.0.0.1@evil.example", "127.0.0.1 x"),
        *("[127.0.0.1].evil.example", "[::1]evil.example:80"),
    ],
)
def test_names_of_others_are_refused(host):
    assert not rule("box.example").allows(host)


def test_a_server_that_strangers_pages_could_use_has_a_rule_by_default():
    for loopback in ("127.0.0.1", "::1", "localhost", "127.8.0.1", "LOCALHOST", "localhost."):
        assert isinstance(rule(listens_on=loopback), HostRule)
        assert rule(listens_on=loopback, has_keys=True) is None
    for reachable in ("0.0.0.0", "", "::", "10.0.0.5", "box.example"):
        assert rule(listens_on=reachable) is None
        assert rule("box.example", listens_on=reachable, has_keys=True) is not None
    assert rule("*") is None


@pytest.mark.parametrize("name", ["http://x", "x/y", "x:80", "", "a b", "*.example"])
def test_a_name_that_no_host_header_has_is_refused(name):
    with pytest.raises(ConfigurationError, match="allowed_hosts has"):
        rule(name)


def test_a_call_under_another_name_gets_421_and_its_connection_ends():
    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    checked = RequestHead(app, hosts=rule())
    answer = call(checked, "/", method="GET", headers=(), host=(b"host", b"evil.example"))
    assert (answer.status, answer.error["code"]) == (421, "host_not_allowed")
    assert "--allowed-hosts" in answer.error["message"]
    assert answer.headers["connection"] == "close"
    assert call(checked, "/", headers=(), host=(b"host", b"localhost")).status == 200
