"""The server's side of an engine process: sends requests, receives tokens, recovers; no torch."""
