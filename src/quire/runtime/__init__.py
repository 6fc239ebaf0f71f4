"""Executes steps on a model: rows, KV storage, graphs, worker processes."""
