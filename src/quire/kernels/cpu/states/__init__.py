"""The native kernels of recurrent layers: their structures, and how programs call them."""
