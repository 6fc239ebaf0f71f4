"""Engines on other machines: agents, the connections to them, and agents placed by Ray."""

DEFAULT_HEARTBEAT_S = 3.0
"""Seconds between two heartbeats of an agent. It stands here because options need it before asyncio
is imported."""
