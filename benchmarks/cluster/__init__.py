"""Fleets of engines: failover over machines, and what the router costs."""
