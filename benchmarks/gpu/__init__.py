"""Checks and measurements on one NVIDIA GPU."""
