"""Runs the real scheduler and KV memory on a virtual clock, and checks all their steps."""
