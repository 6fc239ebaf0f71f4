"""Adapters (LoRA) of packed linears."""
