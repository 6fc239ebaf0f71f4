"""The host tier: copies of a GPU's blocks in page-locked host memory."""
