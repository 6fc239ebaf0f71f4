"""What GGUF files say of themselves."""
