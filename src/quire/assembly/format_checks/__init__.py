"""Runs a prompt when an engine starts, to check whether number formats suit the model."""
