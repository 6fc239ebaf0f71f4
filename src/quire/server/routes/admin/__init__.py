"""Endpoints about the server: health, metrics, memory, version, API documentation, web page."""
