"""Blocks of the KV cache: their holders, their contents and their eviction."""
