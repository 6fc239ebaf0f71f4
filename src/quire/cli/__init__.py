"""The `quire` command; the only reader of environment variables."""
