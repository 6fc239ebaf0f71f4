"""Streaming parsers that split model output into text, reasoning and tool calls."""
