"""Running servers: cost, load, attacks, failures."""
