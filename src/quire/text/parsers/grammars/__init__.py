"""Writes grammars of messages that the readers of the same dialect can read."""
