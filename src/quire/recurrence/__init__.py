"""Recurrent layers: a step's tokens update the fixed-size states of their sequences."""
