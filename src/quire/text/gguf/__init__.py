"""Builds tokenizers and chat templates from the metadata of GGUF files."""
