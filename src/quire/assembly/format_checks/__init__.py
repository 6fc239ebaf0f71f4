"""Measures at the start, by a prompt, whether a model bears its number formats."""
