"""`quire replay`: sends a recorded load to a simulated engine or a running server."""
