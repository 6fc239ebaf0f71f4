"""Linears that keep a checkpoint's block-quantized weights (GGUF, GPTQ, AWQ and others)."""
