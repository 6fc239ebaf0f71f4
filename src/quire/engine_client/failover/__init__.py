"""Failover of a fleet: which request crashed an engine, and where the other requests continue."""
