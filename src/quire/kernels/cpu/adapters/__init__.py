"""LoRA adapters of linears with packed weights, for the native CPU kernels."""
