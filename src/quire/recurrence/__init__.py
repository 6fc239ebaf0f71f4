"""Recurrent layers: how a step's tokens move the fixed-size states of their sequences."""
