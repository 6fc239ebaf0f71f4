"""Builds tokenizers and reads chat templates from the metadata of GGUF files."""
