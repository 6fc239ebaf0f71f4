"""What runs in the next step, and on whose blocks."""
