"""Tokenizers and chat templates of GGUF files, made of their metadata."""
