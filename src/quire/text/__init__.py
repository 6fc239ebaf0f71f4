"""Tokenizers, chat templates and detokenization: text and token ids; no tensors."""
