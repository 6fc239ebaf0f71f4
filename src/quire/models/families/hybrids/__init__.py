"""Families with recurrent layers, beside attention or instead of it."""
