"""HTTP itself: connections, what may come in, JSON bodies, streams, errors."""
