"""Triton matrix products, dense and quantized."""
