"""Engines on other machines: agents, the connections to them, and agents placed by Ray."""
