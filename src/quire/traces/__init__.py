"""Traces of requests without text: arrival times, lengths and shared prefixes."""
