"""HTTP itself: connections, checks of calls, JSON bodies, streams, errors."""
