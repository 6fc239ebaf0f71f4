"""Reads weights and configs from GGUF files."""
