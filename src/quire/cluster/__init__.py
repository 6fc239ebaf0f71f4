"""Several engines of one model: their places, the choice among them, and their number."""
