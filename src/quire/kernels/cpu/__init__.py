"""The CPU kernels: C++ in `csrc/`, called from Python through `library.py`."""
