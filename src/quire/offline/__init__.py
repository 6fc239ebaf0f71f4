"""The Python API: `LLM(...)`, an engine inside the caller's process, and `AsyncLLM(...)`."""
