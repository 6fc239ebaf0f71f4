"""Attacks on the reading of images."""
