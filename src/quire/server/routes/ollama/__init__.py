"""Ollama's API: chats and completions in lines of JSON, and the served models."""
