"""Weights and configs from GGUF files."""
