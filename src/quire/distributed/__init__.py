"""Processes that compute one model together: groups and their collectives."""
