"""Streaming parsers for reasoning and tool calls, in formats that data files describe."""
