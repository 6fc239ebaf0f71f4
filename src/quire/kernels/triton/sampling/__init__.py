"""Triton kernels that turn logits into tokens."""
