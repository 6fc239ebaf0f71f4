"""Models: families, their configs, and the checkpoints that fill them."""
