"""Routing policies, one per file; `routing.find` lists them by name."""
