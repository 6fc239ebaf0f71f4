"""The engine's pure logic: requests, KV memory, scheduling; no torch, clock, threads or asyncio."""
