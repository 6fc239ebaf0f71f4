"""Gemma 2 and its successors."""
