"""Checkpoints whose weights others have quantized, in safetensors files."""
