"""Endpoints about the server: health, metrics, memory, version, the API's page."""
