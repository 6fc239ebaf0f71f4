"""Towers: encoders that turn images into embeddings for a language model."""
