"""Intersections of expressions: what they may cost, found before they are compiled."""
