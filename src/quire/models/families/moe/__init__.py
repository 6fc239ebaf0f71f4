"""Families whose MLPs are mixtures of experts, one file each; listed in `models.registry`."""
