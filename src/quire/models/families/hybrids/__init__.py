"""Families whose layers have recurrent states, beside attention or in its place."""
