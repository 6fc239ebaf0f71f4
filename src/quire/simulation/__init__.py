"""Runs the real scheduler and memory on a virtual clock, with a runner that checks them."""
