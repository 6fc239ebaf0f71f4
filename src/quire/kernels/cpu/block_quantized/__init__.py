"""Block-quantized checkpoint weights (codes with scales), packed for the native kernels."""
