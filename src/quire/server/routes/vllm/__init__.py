"""Endpoints that vLLM adds to OpenAI's."""
