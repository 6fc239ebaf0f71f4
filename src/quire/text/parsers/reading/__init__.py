"""Readers of a message and its calls, while the text arrives."""
