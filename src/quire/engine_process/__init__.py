"""The processes of an engine and its ranks: their mains, and the main loop."""
