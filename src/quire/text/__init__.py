"""Tokenizers, chat templates, grammars and response parsers: text and token ids, no tensors."""
