"""Kernels: a model's operators for the CPU, the GPU and plain torch."""
