"""Attention backends: how a step's queries attend over the paged KV cache."""
