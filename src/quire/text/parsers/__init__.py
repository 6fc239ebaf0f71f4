"""A streaming parser of reasoning and tool calls in the formats that data files describe."""
