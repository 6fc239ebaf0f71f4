"""The pure heart: requests, sequences, steps; no torch, clock, threads or asyncio."""
