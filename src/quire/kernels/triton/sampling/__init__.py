"""Triton kernels from logits to tokens."""
