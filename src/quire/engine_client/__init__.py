"""The server's side of an engine process: requests, results, the process's life; no torch."""
