"""`LLM(...)`: an engine inside the caller's process."""
