"""Model folders: finding them, and reading their small JSON files; no torch."""
