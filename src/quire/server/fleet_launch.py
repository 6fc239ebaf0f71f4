"""Starts the replicas of a server: `quire serve --replicas N`. Called by `launch`."""

import asyncio
from collections.abc import Mapping

from quire.cluster.fleet import Fleet
from quire.cluster.local import local_places
from quire.cluster.placement import RoutedPlacement
from quire.engine_client.messages import OnProgress
from quire.engine_client.recovery import RecoveryConfig
from quire.routing.find import find_routing_policy
from quire.server.config import ServerConfig


async def start_replicas(
    options: Mapping[str, object],
    server: ServerConfig,
    recovery: RecoveryConfig,
    on_progress: OnProgress,
) -> Fleet:
    """As many engines as the server's options say. options: of each. Raises what they can't be
    built with; then no process is left."""
    placement = RoutedPlacement(
        find_routing_policy(server.routing_policy), asyncio.get_running_loop().time
    )
    fleet = Fleet(
        {**options, "tells_fingerprint": True},
        placement,
        max_queued_requests=server.max_queued_requests,
        recovery=recovery,
        on_progress=on_progress,
    )
    await fleet.start(local_places(server.replicas, options))
    return fleet
