"""Triton kernels that read and write the paged KV cache."""
