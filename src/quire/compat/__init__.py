"""Names of other engines: what quire has in their place, or why it has none."""
