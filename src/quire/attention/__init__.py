"""Attention backends over the paged KV cache, and KV formats: how K and V are stored."""
