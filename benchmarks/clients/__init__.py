"""Real clients of others against `quire serve`."""
