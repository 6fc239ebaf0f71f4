"""What the server's options make of the bounds that all calls share."""

import logging

import pytest

from quire.errors import ConfigurationError
from quire.server.config import ServerConfig
from quire.server.http.body_budget import FREE_BYTES
from quire.server.http.open_connections import OpenConnections
from quire.server.http.open_files import MAX_CONNECTIONS
from quire.server.shared_limits import TOTAL_BODIES, body_budget, open_connections


def room_of(budget, tenant):
    """The longest body of which a tenant may have one, by trying powers of two."""
    upload, num_bytes = budget.open(tenant), 1
    try:
        while num_bytes < 1 << 40:
            upload.expect(FREE_BYTES + 2 * num_bytes)
            num_bytes *= 2
    except Exception:
        return num_bytes
    raise AssertionError("there is no bound")


@pytest.mark.parametrize(
    ("options", "of_all", "of_tenant"),
    [
        ({}, TOTAL_BODIES * (8 << 20), TOTAL_BODIES * (4 << 20)),
        ({"max_body_bytes": 1 << 30}, TOTAL_BODIES << 30, TOTAL_BODIES << 29),
        ({"max_total_body_bytes": 8 << 20}, 8 << 20, 8 << 20),
        ({"max_tenant_body_bytes": 16 << 20}, TOTAL_BODIES * (8 << 20), 16 << 20),
    ],
)
def test_bodies_have_room_for_some_of_the_longest(options, of_all, of_tenant):
    budget = body_budget(ServerConfig(**options))
    assert (room_of(budget, ""), room_of(budget, "alice")) == (of_all, of_tenant)


@pytest.mark.parametrize("name", ["max_total_body_bytes", "max_tenant_body_bytes"])
def test_a_budget_in_which_the_longest_body_has_no_room_is_refused(name):
    with pytest.raises(ConfigurationError, match=f"{name} is 100, but must be at least"):
        body_budget(ServerConfig(**{name: 100}))


def test_one_address_may_have_half_of_the_connections(caplog):
    with caplog.at_level(logging.WARNING):
        found = open_connections(ServerConfig(), 1 << 16)
    assert found.max_open == MAX_CONNECTIONS and not caplog.records
    assert of_one_address(found) == MAX_CONNECTIONS // 2
    assert of_one_address(open_connections(ServerConfig(max_connections=1), 1 << 16)) == 1
    own = ServerConfig(max_connections=100, max_connections_per_address=90)
    with caplog.at_level(logging.WARNING):
        assert of_one_address(open_connections(own, 1 << 16)) == 90
    assert "less than max_queued_requests, 1024" in caplog.text


def of_one_address(connections: OpenConnections) -> int:
    """How many connections an address may have."""
    number = 0
    while connections.admit(object(), "10.0.0.1"):
        number += 1
    return number
