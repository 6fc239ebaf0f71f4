"""Model families, their configs, and the loading of their checkpoints."""
