"""Traces of requests: when they came, their lengths and the prefixes they shared; no text."""
