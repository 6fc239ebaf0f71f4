"""The server's side of engine processes: sends requests, receives tokens, recovers; no torch."""
