"""`quire doctor`: what this machine has for quire, and what would make it faster."""
