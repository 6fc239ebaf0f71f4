"""Ollama's API: chats and completions in lines of JSON, and what is served."""
