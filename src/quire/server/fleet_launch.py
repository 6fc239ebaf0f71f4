"""Starts a server's engine, or its fleet of engines, here or on other machines.

Called by `launch`.
"""

import asyncio
from collections.abc import Mapping
from pathlib import Path

from quire.cluster.engine_slots import AgentSlots, LocalSlots, new_server_id
from quire.cluster.machines.cluster_key import new_key, read_key
from quire.cluster.machines.ray_agents import RayAgents
from quire.cluster.placement import RoutedPlacement
from quire.cluster.scaling import Autoscaler, ScalingConfig
from quire.cluster.silence_watch import SilenceWatch
from quire.cluster.slowness_poller import SlownessPoller
from quire.engine_client.engine_slot import EngineSlots
from quire.engine_client.fleet import EngineFleet
from quire.engine_client.messages import OnProgress
from quire.engine_client.one_engine import start_one_engine
from quire.engine_client.process.early_process import EarlyProcess
from quire.engine_client.recovery import RecoveryConfig
from quire.errors import ConfigurationError
from quire.routing.find import ROUTING_POLICIES
from quire.server.config import ServerConfig

ALWAYS = 1 << 30
"""Allowed restarts of an engine on another machine: no limit, since the machine may be away for
hours."""

LONGEST_RETRY_S = 5.0


async def start_engines(
    options: Mapping[str, object],
    server: ServerConfig,
    on_progress: OnProgress,
    early: EarlyProcess | None = None,
) -> EngineFleet:
    """Start one engine or a fleet, according to `server`. `options` are the options of each engine.
    `early` is the process of a single engine; None if it has not started. If an engine can't be
    built, raises the engine's error and leaves no process behind."""
    recovery = RecoveryConfig(
        max_restarts=server.max_engine_restarts, heartbeat_timeout_s=server.heartbeat_timeout_s
    )
    # First, start a single engine if there will never be another.
    if server.has_one_engine:
        return await start_one_engine(
            options,
            max_queued_requests=server.max_queued_requests,
            early=early,
            recovery=recovery,
            on_progress=on_progress,
        )
    if server.is_over_machines:
        recovery = RecoveryConfig(
            max_restarts=ALWAYS,
            heartbeat_timeout_s=server.heartbeat_timeout_s,
            max_backoff_s=LONGEST_RETRY_S,
        )
    # Otherwise make a fleet, with the tasks that watch it.
    policy, clock = ROUTING_POLICIES.make(server.routing_policy), asyncio.get_running_loop().time
    placement, scaling = RoutedPlacement(policy, clock), None
    if server.max_replicas is not None:
        scaling = ScalingConfig(server.replicas, server.max_replicas, server.scale_wait_s)
    fleet = EngineFleet(
        {**options, "tells_fingerprint": True},
        placement,
        await asyncio.to_thread(_engine_slots, options, server),
        max_queued_requests=server.max_queued_requests,
        recovery=recovery,
        on_progress=on_progress,
        scaling=scaling,
    )
    fleet.watches = [
        SlownessPoller(fleet.engines, placement),
        SilenceWatch(fleet.engines, fleet.dispatcher),
        *([] if scaling is None else [Autoscaler(fleet.engines, scaling)]),
    ]
    await fleet.start()
    return fleet


def check_fleet(server: ServerConfig) -> None:
    """Raises ConfigurationError for options that contradict each other or have no effect."""
    _check_needed(server)
    _check_sleep(server)
    if server.max_replicas is not None and server.max_replicas < server.replicas:
        raise ConfigurationError(
            f"max_replicas is {server.max_replicas}, below replicas, {server.replicas}"
        )
    if server.agents and server.max_replicas is not None:
        raise ConfigurationError(
            "agents are named, each of which has one replica, and max_replicas is set; leave it out"
        )
    if server.agents and server.replicas > 1:
        raise ConfigurationError(
            "agents are named, each of which has one replica, and replicas is set, too; leave"
            " replicas out"
        )
    if server.agents and server.ray_address is not None:
        raise ConfigurationError(
            "agents are named, and Ray is to place others (ray_address, which quire cluster serve"
            " sets); leave agents out, or use quire serve without ray_address"
        )
    if server.agents and server.cluster_key_file is None:
        raise ConfigurationError(
            "agents are named, but no cluster_key_file; give the one that they were started with"
        )


def _check_sleep(server: ServerConfig) -> None:
    if server.idle_unload_s is not None and (
        server.is_over_machines or server.max_replicas is not None
    ):
        raise ConfigurationError(
            "idle_unload_s is set, but engines on other machines and a fleet that scales by itself"
            " can't be put to sleep; leave it out, or leave out agents, ray_address and"
            " max_replicas"
        )


def _check_needed(server: ServerConfig) -> None:
    """Refuse options that have no effect because they belong to a kind of fleet that this server
    does not use."""
    is_fleet = server.is_over_machines or max(server.replicas, server.max_replicas or 1) > 1
    of_ray = server.ray_address is not None
    kinds = {
        "cluster_key_file": (server.is_over_machines, "agents or ray_address"),
        "link_heartbeat_s": (server.is_over_machines, "agents or ray_address"),
        "replica_cpus": (of_ray, "ray_address"),
        "replica_gpus": (of_ray, "ray_address"),
        "scale_wait_s": (server.max_replicas is not None, "max_replicas"),
        "models_memory": (server.models_file is not None, "models"),
        "models_keep_processes": (server.models_file is not None, "models"),
        "models_wait_s": (server.models_file is not None, "models"),
        "routing_policy": (is_fleet, "replicas, agents or ray_address"),
    }
    standard = ServerConfig()
    for name, (is_used, needed) in kinds.items():
        value = getattr(server, name)
        if not is_used and value != getattr(standard, name):
            raise ConfigurationError(
                f"{name} is {value!r}, but changes nothing without {needed}; leave it out, or set"
                " that"
            )


def _engine_slots(options: Mapping[str, object], server: ServerConfig) -> EngineSlots:
    if server.agents:
        assert server.cluster_key_file is not None, "`check_fleet` looks for it"
        key = read_key(Path(server.cluster_key_file))
        return AgentSlots(server.agents, key, server.link_heartbeat_s)
    if server.ray_address is not None:
        file = server.cluster_key_file
        return RayAgents(
            server.ray_address,
            new_key() if file is None else read_key(Path(file)),
            new_server_id(),
            server.link_heartbeat_s,
            num_engines=server.replicas,
            num_cpus=server.replica_cpus,
            num_gpus=server.replica_gpus or 0.0,
        )
    return LocalSlots(server.replicas, options, server.max_replicas)
