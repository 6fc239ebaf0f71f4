"""Incremental readers of a message and its calls."""
