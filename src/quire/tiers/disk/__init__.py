"""The disk tier: copies of cached blocks in files, which outlive the process."""
