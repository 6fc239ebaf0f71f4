"""Anthropic's API: Messages, whole and streamed, and counts of a prompt's tokens."""
