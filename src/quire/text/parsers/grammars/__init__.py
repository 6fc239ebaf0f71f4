"""Writes grammars that restrict messages to what the parser of the same dialect can read."""
