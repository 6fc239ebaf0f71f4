"""The front's side of an engine process: requests out, tokens and recovery back; no torch."""
