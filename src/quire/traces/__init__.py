"""Request traces: arrival times, lengths and shared prefixes of requests, without their text."""
