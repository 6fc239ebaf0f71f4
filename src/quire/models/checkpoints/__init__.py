"""Reads checkpoint files and fills a model's parameters from them."""
