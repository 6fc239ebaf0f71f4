"""Chooses the replica of a fleet for each request; no clock, threads or asyncio."""
