"""Makes the server-wide bounds of bodies and connections from the server's options.

`limits` bounds a single call, `tenants` the generations of a tenant. Called by `launch`.
"""

from quire.errors import ConfigurationError
from quire.observability.log import get_logger
from quire.server.config import ServerConfig
from quire.server.http.body_budget import BodyBudget
from quire.server.http.open_connections import OpenConnections
from quire.server.http.open_files import connections_allowed

TOTAL_BODIES = 16
"""Default bound of the bodies of all open calls together, as a multiple of the maximum body."""

logger = get_logger(__name__)


def body_budget(server: ServerConfig) -> BodyBudget:
    """The bounds of all open bodies together, and of one tenant's. Raises ConfigurationError."""
    of_all = server.max_total_body_bytes or TOTAL_BODIES * server.max_body_bytes
    of_tenant = server.max_tenant_body_bytes or max(server.max_body_bytes, of_all // 2)
    bounds = {"max_total_body_bytes": of_all, "max_tenant_body_bytes": of_tenant}
    for name, bound in bounds.items():
        if bound < server.max_body_bytes:
            raise ConfigurationError(
                f"{name} is {bound}, but must be at least max_body_bytes, {server.max_body_bytes},"
                " or no call could have a body of that length"
            )
    return BodyBudget(of_all, of_tenant)


def open_connections(server: ServerConfig, num_files: int) -> OpenConnections:
    """The object that counts and bounds a server's connections. Raises ConfigurationError."""
    num_replicas = max(server.replicas, server.max_replicas or 1, len(server.agents))
    max_open = connections_allowed(server.max_connections, num_files, num_replicas)
    if max_open < server.max_queued_requests:
        logger.warning(
            "%d connections may be open at once, since the limit of open files is %d. This is less"
            " than max_queued_requests, %d; more clients wait until others end",
            max_open,
            num_files,
            server.max_queued_requests,
        )
    of_address = server.max_connections_per_address or max(1, max_open // 2)
    return OpenConnections(max_open, of_address)
