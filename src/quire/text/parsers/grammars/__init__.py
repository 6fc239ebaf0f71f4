"""Grammars of messages: what they allow, the readers of the same dialect read."""
