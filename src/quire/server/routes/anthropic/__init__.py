"""Anthropic's API: Messages, whole and streamed, and what a prompt counts."""
