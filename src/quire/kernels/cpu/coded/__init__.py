"""Weights as a checkpoint's codes, packed for the native kernels."""
