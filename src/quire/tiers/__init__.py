"""Tiers behind the block pool: copies of cached blocks in files and in host memory."""
