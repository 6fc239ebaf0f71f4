"""Replaces keywords that the grammar engine lacks by equivalent schemas."""
