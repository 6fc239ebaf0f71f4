"""A streaming parser of tool calls and reasoning, configured by dialects in data files."""
