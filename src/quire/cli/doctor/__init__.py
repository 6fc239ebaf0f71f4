"""`quire doctor`: reports what the machine has, and what to improve."""
