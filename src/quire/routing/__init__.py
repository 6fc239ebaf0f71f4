"""Which replica of a fleet gets a request; no clock, threads or asyncio"""
