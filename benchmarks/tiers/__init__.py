"""Measurements of the tiers behind the pool."""
