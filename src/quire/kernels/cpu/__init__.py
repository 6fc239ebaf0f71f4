"""The CPU kernels: C++ in `csrc/`, called through a plain C ABI."""
