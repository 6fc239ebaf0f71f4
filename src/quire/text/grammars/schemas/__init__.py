"""Checks JSON Schemas and translates them for the grammar engine."""
