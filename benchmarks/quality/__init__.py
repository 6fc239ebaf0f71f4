"""What formats cost in quality on real weights."""
