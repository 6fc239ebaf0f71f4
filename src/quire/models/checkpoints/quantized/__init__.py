"""Readers of quantized checkpoints in safetensors files, one module for each method."""
