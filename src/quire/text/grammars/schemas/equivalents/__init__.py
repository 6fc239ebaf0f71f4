"""Keywords that llguidance has not, as schemas without them that allow the same values."""
