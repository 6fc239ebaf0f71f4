"""Tiers behind the pool: copies of cached blocks in files and in a GPU's host memory."""
