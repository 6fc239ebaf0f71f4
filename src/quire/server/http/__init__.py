"""The HTTP layer: connections, checks of calls, JSON bodies, streams, errors."""
