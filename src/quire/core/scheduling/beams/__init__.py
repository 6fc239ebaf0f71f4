"""Beam search: the search itself, and its forks in the scheduler."""
