"""Eviction algorithms compared by hit rate, on traces and synthetic mixes."""
