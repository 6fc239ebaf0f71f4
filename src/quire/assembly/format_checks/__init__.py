"""Checks with a prompt, when an engine starts, whether number formats suit the model."""
