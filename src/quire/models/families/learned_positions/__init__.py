"""Decoders with learned position embeddings."""
