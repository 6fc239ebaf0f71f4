"""Images and videos in prompts: sources of their bytes, decoding, and their places; no torch."""
