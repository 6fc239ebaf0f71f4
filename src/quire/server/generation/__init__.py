"""Calls that generate text: their fields, bounds, engine requests and answers."""
