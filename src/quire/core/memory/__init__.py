"""Blocks of the KV cache: who holds them, what they contain, what is forgotten first."""
