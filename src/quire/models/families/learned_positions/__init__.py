"""Decoders whose positions have learned vectors."""
