"""Bounds the cost of intersections of regular expressions before they are compiled."""
