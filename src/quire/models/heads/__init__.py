"""Heads: small models that draft the next tokens from a model's hidden states."""
