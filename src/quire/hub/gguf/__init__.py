"""Headers of GGUF files: metadata, tensors, token types, file names and generation settings."""
