"""The page of a server: what it costs, and whether it works in a browser."""
