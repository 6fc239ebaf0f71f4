"""One streaming parser of tool calls and reasoning; dialects are data."""
