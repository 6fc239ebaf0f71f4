"""A call's tenant, what of the cache it shares with whom, and its deadline."""

from types import SimpleNamespace

import pytest
from fastapi import Request as HTTPRequest

from quire.errors import InvalidRequestError
from quire.server.service import Service
from quire.server.tenants.tenancy import options_of, tenant_of
from quire.server.tenants.tenants import NO_TENANT, Tenant


def request(tenant=None, key=None, default_deadline_s=None, **headers):
    """A call as the guard leaves it; key: that came in its header, checked or not."""
    service = Service(None, None, None, "mine", default_deadline_s=default_deadline_s)
    headers = {name.replace("_", "-"): value for name, value in headers.items()}
    if key is not None:
        headers["authorization"] = f"Bearer {key}"
    return HTTPRequest(
        {
            "type": "http",
            "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
            "app": SimpleNamespace(state=SimpleNamespace(service=service)),
            "state": {} if tenant is None else {"tenant": Tenant(tenant)},
        }
    )


def body(priority=0, cache_salt=None, deadline_s=None):
    return SimpleNamespace(priority=priority, cache_salt=cache_salt, deadline_s=deadline_s)


def domain(http, salt=None):
    return options_of(http, body(cache_salt=salt)).cache_domain


def test_the_tenant_is_whom_the_guard_found():
    assert tenant_of(request("alice")) == Tenant("alice")
    assert tenant_of(request()) == NO_TENANT
    options = options_of(request("alice", key="alice-key-1"), body(priority=2))
    assert (options.tenant, options.priority) == ("alice", 2)


def test_the_cache_is_shared_within_a_tenant_and_a_salt_only():
    first, second = request("alice", key="alice-key-1"), request("alice", key="alice-key-2")
    assert domain(first) == domain(second)
    assert domain(first, "salt") == domain(second, "salt")
    domains = [
        domain(first),
        domain(first, "salt"),
        domain(first, "other"),
        domain(request("bob")),
        domain(request("bob"), "salt"),
        domain(request("")),
    ]
    assert len(set(domains)) == len(domains)


def test_without_keys_what_is_sent_as_one_still_parts_the_cache_but_is_no_tenant():
    senders = [
        request("", key="a"),
        request("", key="b"),
        request("", x_api_key="a"),
        request("", authorization="Basic a"),
        request(""),
    ]
    assert {options_of(http, body()).tenant for http in senders} == {""}
    domains = [domain(http, salt) for http in senders for salt in (None, "salt")]
    assert len(set(domains)) == len(domains)
    assert domain(request("", key="a"), "salt") == domains[1]
    assert not any("Bearer" in each for each in domains)


def test_parts_of_key_and_salt_can_not_be_shifted():
    assert domain(request("", key="a"), "bc") != domain(request("", key="ab"), "c")
    assert domain(request("", authorization="a", x_api_key="b")) != domain(
        request("", authorization="ab")
    )


def test_a_salt_may_be_any_text_of_a_bounded_length():
    assert domain(request("", key="a"), "\ue000 é") != domain(request("", key="a"), "\ue000 è")
    for http in (request("alice"), request("", key="a")):
        with pytest.raises(InvalidRequestError, match="at most 256 characters") as caught:
            options_of(http, body(cache_salt="x" * 257))
        assert caught.value.param == "cache_salt"


@pytest.mark.parametrize(
    ("asked", "default", "expected"),
    [(None, None, None), (None, 30.0, 30.0), (5.0, None, 5.0), (60.0, 30.0, 60.0)],
)
def test_a_call_has_its_own_deadline_or_the_servers(asked, default, expected):
    http = request(default_deadline_s=default)
    assert options_of(http, body(deadline_s=asked)).deadline_s == expected
