"""The `quire` command. No other package of quire reads environment variables."""
