"""Engines on other machines: agents, the connections to them, and Ray, which places them."""
