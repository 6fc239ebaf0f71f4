"""Whole engines on a CPU, beside their peers and what the machine allows."""
