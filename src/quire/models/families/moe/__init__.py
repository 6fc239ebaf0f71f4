"""Families with mixtures of experts as MLPs, which `models.registry` lists."""
