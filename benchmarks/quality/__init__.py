"""Measures the cost of formats in quality on real weights."""
