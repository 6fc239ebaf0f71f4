"""Finds model folders and reads their small JSON files, without torch."""
