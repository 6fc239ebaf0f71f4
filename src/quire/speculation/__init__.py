"""Proposers, which guess the next tokens of a sequence for the model to verify."""
