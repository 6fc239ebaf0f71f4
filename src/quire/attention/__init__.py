"""Attention over the paged KV cache: one interface, a file or two for each backend."""
